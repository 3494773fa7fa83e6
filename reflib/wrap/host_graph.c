/* The process's side of a C++ wrapper: a Python callable that passes tensors to it and takes tensors from it.

   A torch.Tensor in Python holds its at::Tensor right behind the object's head, so its address is the handle that
   PyTorch's C interface takes: nothing is looked up or copied. (Where tensors lie otherwise, host.py does without.)

   The GIL is released while the wrapper runs, and taken only to call a Python function or to drop an input.

   A part of host.c, which includes it. */
static Torch torch_table;
static PyTypeObject *tensor_type;
static PyObject *(*wrap)(Handle); /* a Python object for a handle whose owner does not change: THPVariable_Wrap */
static PyObject *described;   /* a function: text for the argument that was passed, for error messages */
static PyObject *error_types; /* by FAILED_..., and one more: */
enum { OUT_OF_MEMORY = FAILED_WRAPPER + 1 };
enum { MOST_VALUES = 64, HEAD = sizeof(PyObject) }; /* values of a call on the stack; more are allocated */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Host host;
    WrapperEntry entry;
    Py_ssize_t inputs, outputs;
    PyObject *name, *functions, *loaders, *objects, *constants, *owner, *images;
    Kernel *kernels;
    Py_ssize_t kernel_count;
    int unloads; /* modules are unloaded with it: nothing else may hold its kernels (a CUDA graph would) */
    PyObject *zeros; /* (device, stream, count) -> a tensor */
    pthread_mutex_t lock;
    struct Words { int32_t device; void *stream; int64_t count; void *words; PyObject *tensor; } words[8];
    int next_words;
} Graph;

/* One call: the frame of host.h, and what only this side needs. */
typedef struct {
    Frame frame;
    Graph *graph;
    PyObject **owned; /* the inputs */
    PyObject *kept; /* a list: zeroed words of a stream capture, which belong to this call */
    PyThreadState *state;
    PyObject *type, *value, *trace; /* an exception that Python raised */
} Call;

static Graph *graph_of(Host *host) { return (Graph *)((char *)host - offsetof(Graph, host)); }

/* -- tensors and handles ------------------------------------------------------------------------------------------ */
/* The handle of a tensor, which the object keeps. */
static Handle borrow(PyObject *o) { return (Handle)((char *)o + HEAD); }

static PyObject *to_python(Graph *g, const Value *v) {
    switch (v->kind) {
    case VALUE_TENSOR: return wrap(v->tensor);
    case VALUE_INT: return PyLong_FromLongLong(v->integer);
    case VALUE_BOOL: return PyBool_FromLong(v->integer != 0);
    case VALUE_FLOAT: return PyFloat_FromDouble(v->number);
    case VALUE_OBJECT: return Py_NewRef(PyTuple_GET_ITEM(g->objects, v->object));
    default: Py_RETURN_NONE;
    }
}

/* A Python result as a value, owned by the caller. */
static int to_value(PyObject *o, Value *v) {
    v->kind = VALUE_NONE;
    if (PyObject_TypeCheck(o, tensor_type)) {
        if (torch_table.new_handle(borrow(o), &v->tensor)) {
            PyErr_SetString(PyExc_RuntimeError, "a tensor has no handle");
            return -1;
        }
        v->kind = VALUE_TENSOR;
    } else if (PyLong_Check(o)) {
        v->kind = PyBool_Check(o) ? VALUE_BOOL : VALUE_INT;
        v->integer = PyLong_AsLongLong(o);
    } else if (PyFloat_Check(o)) {
        v->kind = VALUE_FLOAT;
        v->number = PyFloat_AS_DOUBLE(o);
    } else if (o != Py_None) { /* a size that is a torch.SymInt, a bool of numpy's ... */
        PyObject *index = PyNumber_Index(o);
        if (!index) return -1;
        v->kind = VALUE_INT;
        v->integer = PyLong_AsLongLong(index);
        Py_DECREF(index);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* -- what a wrapper calls ----------------------------------------------------------------------------------------- */
static void take_gil(Call *c) { PyEval_RestoreThread(c->state); }
static void give_gil(Call *c) { c->state = PyEval_SaveThread(); }

static int raised(Call *c) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a call of PyTorch's C interface failed");
    PyErr_Fetch(&c->type, &c->value, &c->trace);
    c->frame.kind = FAILED_PYTHON;
    return -1;
}

static int32_t call_python(Host *host, Frame *frame, int32_t which, const Value *args, int32_t n, Value *results, int32_t m) {
    Call *c = (Call *)frame;
    Graph *g = graph_of(host);
    int rc = -1, filled = 0;
    take_gil(c);
    if (PyErr_Occurred()) { /* a C++ call failed in Python code: it is known why */
        raised(c);
        give_gil(c);
        return -1;
    }
    PyObject *tuple = PyTuple_New(n), *out = NULL;
    for (int i = 0; tuple && i < n; ++i) {
        PyObject *o = to_python(g, &args[i]);
        if (!o) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, o);
    }
    if (tuple) out = PyObject_CallObject(PyTuple_GET_ITEM(g->functions, which), tuple);
    Py_XDECREF(tuple);
    if (out && (!PyTuple_Check(out) || PyTuple_GET_SIZE(out) < m)) {
        PyErr_Format(PyExc_RuntimeError, "a function of the wrapper did not return %d results", (int)m);
        Py_CLEAR(out);
    }
    if (out) {
        rc = 0;
        for (; rc == 0 && filled < m; ++filled) rc = to_value(PyTuple_GET_ITEM(out, filled), &results[filled]);
        if (rc)
            for (int i = 0; i < filled; ++i)
                if (results[i].kind == VALUE_TENSOR) torch_table.delete_handle(results[i].tensor);
        Py_DECREF(out);
    }
    if (rc) raised(c);
    give_gil(c);
    return rc;
}

static void drop_input(Host *host, Frame *frame, int32_t i) {
    Call *c = (Call *)frame;
    take_gil(c);
    Py_CLEAR(c->owned[i]);
    give_gil(c);
}

static int32_t load_kernel(Host *host, Frame *frame, int32_t i) {
    Call *c = (Call *)frame;
    Graph *g = graph_of(host);
    int rc = 0;
    take_gil(c);
    if (!g->kernels[i].function) {
        PyObject *facts = PyObject_CallNoArgs(PyTuple_GET_ITEM(g->loaders, i));
        rc = !facts || PyList_Append(g->images, facts) || fill_kernel(&g->kernels[i], facts) ? raised(c) : 0;
        Py_XDECREF(facts);
    }
    give_gil(c);
    return rc;
}

static int capturing(void *stream) {
    int status = 0;
    return !need_driver() && cuda.StreamIsCapturing && !cuda.StreamIsCapturing((CUstream)stream, &status) && status;
}

static int32_t zero_words(Host *host, Frame *frame, int32_t device, void *stream, int64_t count, void **words) {
    Call *c = (Call *)frame;
    Graph *g = graph_of(host);
    int captures = capturing(stream);
    if (!captures) {
        *words = NULL;
        pthread_mutex_lock(&g->lock);
        for (int i = 0; i < 8; ++i)
            if (g->words[i].tensor && g->words[i].device == device && g->words[i].stream == stream &&
                g->words[i].count >= count)
                *words = g->words[i].words;
        pthread_mutex_unlock(&g->lock);
        if (*words) return 0;
    }
    take_gil(c);
    PyObject *tensor = PyObject_CallFunction(g->zeros, "iKL", (int)device, (unsigned long long)(uintptr_t)stream,
                                             (long long)count);
    int rc = tensor && !torch_table.data_ptr(borrow(tensor), words) ? 0 : -1;
    if (!rc && captures) /* nothing else may hold them, and their memory must not be reused */
        rc = (c->kept || (c->kept = PyList_New(0))) ? PyList_Append(c->kept, tensor) : -1;
    if (rc) raised(c);
    if (!rc && !captures) {
        pthread_mutex_lock(&g->lock);
        struct Words *w = &g->words[g->next_words++ % 8];
        PyObject *before = w->tensor;
        *w = (struct Words){device, stream, count, *words, Py_NewRef(tensor)};
        pthread_mutex_unlock(&g->lock);
        Py_XDECREF(before);
    }
    Py_XDECREF(tensor);
    give_gil(c);
    return rc;
}

static int32_t launch_kernel(Host *host, Frame *frame, const Kernel *k, int64_t grid, void *stream, void **params) {
    char text[400];
    if (__builtin_expect(!start_kernel(k, grid, stream, params, text, sizeof text), 1)) return 0;
    frame->kind = FAILED_DRIVER;
    snprintf(frame->text, sizeof frame->text, "cannot launch: %s", text);
    return -1;
}

/* -- a call ------------------------------------------------------------------------------------------------------- */
static PyObject *raise(Call *c, PyObject **all) {
    Graph *g = c->graph;
    Frame *f = &c->frame;
    const char *step = f->step ? f->step : "the start";
    if (PyErr_Occurred()) { /* a C++ call failed in Python code */
        if (f->kind == FAILED_PYTHON) Py_XDECREF(c->type), Py_XDECREF(c->value), Py_XDECREF(c->trace);
        return NULL;
    }
    if (f->kind == FAILED_PYTHON) {
        PyErr_Restore(c->type, c->value, c->trace);
        return NULL;
    }
    const char *what = f->text[0] ? f->text : f->kind == FAILED_TORCH && torch_table.what ? torch_table.what() : NULL;
    int memory = f->kind == FAILED_TORCH && what && strstr(what, "out of memory");
    PyObject *type = PyTuple_GET_ITEM(error_types, memory ? OUT_OF_MEMORY : f->kind ? f->kind : FAILED_WRAPPER);
    int i = f->argument;
    if (f->kind == FAILED_INDEX || (f->kind == FAILED_ARGUMENT && i < 0)) return PyErr_Format(type, "%s", f->text);
    if (f->kind == FAILED_ARGUMENT) {
        PyObject *came = PyObject_CallOneArg(described, all[i] ? all[i] : Py_None);
        if (came) PyErr_Format(type, "%s; got %U", f->text, came);
        Py_XDECREF(came);
        return NULL;
    }
    return PyErr_Format(type, "graph %U, step %s: %s", g->name, step, what && *what ? what : "it failed; see stderr");
}

/* Tensors and 64-bit ints as values; anything else is a VALUE_NONE, which the graph rejects if it reads it. */
static void values_of(PyObject *const *objects, Py_ssize_t n, Value *in) {
    for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject *o = objects[i];
        in[i].kind = VALUE_NONE;
        if (PyObject_TypeCheck(o, tensor_type)) {
            in[i].kind = VALUE_TENSOR;
            in[i].tensor = borrow(o);
        } else if (PyLong_CheckExact(o)) {
            in[i].kind = VALUE_INT;
            in[i].integer = PyLong_AsLongLong(o);
            if (in[i].integer == -1 && PyErr_Occurred()) PyErr_Clear(), in[i].kind = VALUE_NONE;
        }
    }
}

/* Call the graph with `head` followed by `rest`. `list`: holds them; it is emptied as soon as the call holds them.
   `refused`: set instead of raising an exception if the graph rejects an argument. */
static PyObject *run(Graph *g, PyObject *const *head, Py_ssize_t heads, PyObject *const *rest, Py_ssize_t rests,
                     PyObject *list, int *refused) {
    Py_ssize_t n = heads + rests, m = g->outputs;
    PyObject *result = NULL;
    PyObject *owned_[MOST_VALUES], **owned = owned_;
    Value in_[MOST_VALUES], *in = in_, out_[MOST_VALUES], *out = out_;
    if (n > MOST_VALUES || m > MOST_VALUES) {
        in = PyMem_RawMalloc((n + m) * sizeof *in + n * sizeof *owned);
        if (!in) return PyErr_NoMemory();
        out = in + n, owned = (PyObject **)(out + m);
    }
    Call c;
    c.frame.step = NULL, c.frame.kind = 0, c.frame.argument = -1, c.frame.text[0] = 0;
    c.graph = g, c.owned = owned, c.kept = NULL;
    for (Py_ssize_t i = 0; i < n; ++i) owned[i] = Py_NewRef(i < heads ? head[i] : rest[i - heads]);
    values_of(owned, n, in);
    for (Py_ssize_t i = 0; i < m; ++i) out[i].kind = VALUE_NONE;
    int rc = list ? PyList_SetSlice(list, 0, n, NULL) : 0;
    if (!rc) {
        give_gil(&c);
        rc = g->entry(&g->host, &c.frame, in, out);
        take_gil(&c);
        if (rc && refused && c.frame.kind == FAILED_ARGUMENT && !PyErr_Occurred()) *refused = 1;
        else if (rc) raise(&c, owned);
    }
    if (!rc && (result = PyTuple_New(m))) {
        Py_ssize_t i = 0;
        for (; i < m; ++i) {
            PyObject *o = to_python(g, &out[i]);
            if (!o) break;
            PyTuple_SET_ITEM(result, i, o);
        }
        if (i < m) Py_CLEAR(result);
    }
    for (Py_ssize_t i = 0; i < m; ++i)
        if (out[i].kind == VALUE_TENSOR) torch_table.delete_handle(out[i].tensor);
    for (Py_ssize_t i = 0; i < n; ++i) Py_XDECREF(owned[i]);
    Py_XDECREF(c.kept);
    if (in != in_) PyMem_RawFree(in);
    return result;
}

static PyObject *graph_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Graph *g = (Graph *)self;
    PyObject *list = PyVectorcall_NARGS(nargsf) == 1 ? args[0] : NULL;
    if (!list || !PyList_CheckExact(list) || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "a compiled graph takes one list, which it empties");
    Py_ssize_t n = PyList_GET_SIZE(list);
    if (n != g->inputs)
        return PyErr_Format(PyTuple_GET_ITEM(error_types, FAILED_ARGUMENT), "graph %U takes %zd arguments, got %zd",
                            g->name, g->inputs, n);
    return run(g, PySequence_Fast_ITEMS(list), n, NULL, 0, list, NULL);
}

/* -- making one --------------------------------------------------------------------------------------------------- */
static void graph_dealloc(PyObject *self) {
    Graph *g = (Graph *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(g->name), Py_XDECREF(g->functions), Py_XDECREF(g->loaders), Py_XDECREF(g->objects);
    Py_XDECREF(g->constants), Py_XDECREF(g->images), Py_XDECREF(g->zeros);
    for (int i = 0; i < 8; ++i) Py_XDECREF(g->words[i].tensor);
    for (Py_ssize_t i = 0; g->unloads && g->kernels && i < g->kernel_count; ++i) driver_unload(&cuda, &g->kernels[i]);
    PyMem_RawFree(g->host.constants), PyMem_RawFree(g->host.symbols), PyMem_RawFree(g->kernels);
    pthread_mutex_destroy(&g->lock);
    Py_XDECREF(g->owner); /* last: the library that the entry is in */
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef graph_members[] = {
    VECTORCALL(Graph),
    {"name", T_OBJECT, offsetof(Graph, name), READONLY, "the graph's name"},
    {NULL},
};
static PyTypeObject *graph_type;

/* graph(name, entry, inputs, outputs, kernels, loaders, functions, objects, constants, symbols, zeros, owner, gpu,
   unloads) -> Graph
   kernels: (name, facts, or None if a loader returns them later); loaders, functions: callables; constants: tensors;
   symbols: addresses; owner: kept alive; gpu: the device that is number 0 in the wrapper; unloads: see Graph */
static PyObject *make_graph(PyObject *module, PyObject *args) {
    PyObject *name, *kernels, *loaders, *functions, *objects, *constants, *symbols, *zeros, *owner;
    unsigned long long entry;
    Py_ssize_t inputs, outputs;
    int gpu, unloads;
    if (!PyArg_ParseTuple(args, "UKnnO!O!O!O!O!O!OOip", &name, &entry, &inputs, &outputs, &PyTuple_Type, &kernels,
                          &PyTuple_Type, &loaders, &PyTuple_Type, &functions, &PyTuple_Type, &objects, &PyTuple_Type,
                          &constants, &PyTuple_Type, &symbols, &zeros, &owner, &gpu, &unloads))
        return NULL;
    Graph *g = PyObject_New(Graph, graph_type);
    if (!g) return NULL;
    memset((char *)g + sizeof(PyObject), 0, sizeof(Graph) - sizeof(PyObject));
    pthread_mutex_init(&g->lock, NULL);
    Py_ssize_t nk = PyTuple_GET_SIZE(kernels), nc = PyTuple_GET_SIZE(constants), ns = PyTuple_GET_SIZE(symbols);
    g->vectorcall = graph_call;
    g->entry = (WrapperEntry)(uintptr_t)entry;
    g->inputs = inputs, g->outputs = outputs, g->kernel_count = nk;
    g->name = Py_NewRef(name), g->functions = Py_NewRef(functions), g->loaders = Py_NewRef(loaders);
    g->objects = Py_NewRef(objects), g->constants = Py_NewRef(constants), g->zeros = Py_NewRef(zeros);
    g->owner = Py_NewRef(owner), g->images = PyList_New(0);
    g->kernels = PyMem_RawCalloc(nk + 1, sizeof(Kernel));
    g->host.constants = PyMem_RawCalloc(nc + 1, sizeof(Handle));
    g->host.symbols = PyMem_RawCalloc(ns + 1, sizeof(void *));
    if (!g->images || !g->kernels || !g->host.constants || !g->host.symbols) goto fail;
    g->host.torch = &torch_table, g->host.kernels = g->kernels;
    g->host.python = call_python, g->host.load = load_kernel, g->host.zeros = zero_words;
    g->host.launch = launch_kernel, g->host.drop = drop_input;
    g->host.gpu = gpu, g->unloads = unloads;
    for (Py_ssize_t i = 0; i < nk; ++i) {
        PyObject *item = PyTuple_GET_ITEM(kernels, i), *facts = PyTuple_GET_ITEM(item, 1);
        g->kernels[i].name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(item, 0));
        if (!g->kernels[i].name || PyList_Append(g->images, PyTuple_GET_ITEM(item, 0))) goto fail;
        if (facts != Py_None && (PyList_Append(g->images, facts) || fill_kernel(&g->kernels[i], facts))) goto fail;
    }
    for (Py_ssize_t i = 0; i < nc; ++i) g->host.constants[i] = borrow(PyTuple_GET_ITEM(constants, i));
    for (Py_ssize_t i = 0; i < ns; ++i) g->host.symbols[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(symbols, i));
    if (PyErr_Occurred()) goto fail;
    return (PyObject *)g;
fail:
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(g);
    return NULL;
}

#include "host_entry.c"
#include "host_replay.c"

/* Addresses of functions, into a structure of them; a tuple of none leaves it as it is. */
static int fill_table(void *table, size_t size, PyObject *addresses) {
    Py_ssize_t n = PyTuple_GET_SIZE(addresses);
    if (n && n != (Py_ssize_t)(size / sizeof(void *))) return PyErr_Format(PyExc_ValueError, "%zd addresses", n), -1;
    for (Py_ssize_t i = 0; i < n; ++i) {
        void *found = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
        memcpy((char *)table + i * sizeof found, &found, sizeof found);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* setup(tensor type, parameter type, addresses in Torch's order, in eager's or none, wrap's address, errors, described) */
static PyObject *setup(PyObject *module, PyObject *args) {
    PyObject *tensor, *parameter, *addresses, *eagers, *errors, *said;
    unsigned long long wrapper;
    if (!PyArg_ParseTuple(args, "OOO!O!KO!O", &tensor, &parameter, &PyTuple_Type, &addresses, &PyTuple_Type, &eagers,
                          &wrapper, &PyTuple_Type, &errors, &said))
        return NULL;
    if (fill_table(&torch_table, sizeof torch_table, addresses) || fill_table(&eager, sizeof eager, eagers)) return NULL;
    tensor_type = (PyTypeObject *)Py_NewRef(tensor), parameter_type = (PyTypeObject *)Py_NewRef(parameter);
    wrap = (PyObject * (*)(Handle))(uintptr_t)wrapper;
    error_types = Py_NewRef(errors), described = Py_NewRef(said);
    Py_RETURN_NONE;
}

#define GRAPH_METHODS                                                                               \
    {"graph", make_graph, METH_VARARGS, "a compiled graph as a callable"},                          \
    {"entry", make_entry, METH_VARARGS, "the callable of a compiled program"},                      \
    {"replay", make_replay, METH_VARARGS, "a recorded call as a callable"},                         \
    {"setup", setup, METH_VARARGS, "what all graphs share"},                                        \
    {"usual", (PyCFunction)(void (*)(void))usual, METH_FASTCALL, "are arguments in plain memory?"},

static int graph_types(void) {
    graph_type = new_type("_reflib_host.Graph", sizeof(Graph), graph_members, graph_dealloc, NULL);
    entry_type = new_type("_reflib_host.Entry", sizeof(Entry), entry_members, entry_dealloc, entry_traverse);
    replay_type = new_type("_reflib_host.Replay", sizeof(Replay), replay_members, replay_dealloc, NULL);
    return graph_type && entry_type && replay_type ? 0 : -1;
}
