/* A recording of cuda_graphs.py as a callable of a list of inputs. One call compares them with what was recorded,
   replays it, makes its outputs and empties the list. It returns None, and has done nothing, if the recording does not
   fit: another stream or a stream that is being recorded, other numbers or sizes, a fixed input at another address,
   something alive of what the last replay returned, or another thread in the same recording. Inputs that nothing else
   has checked (`like`: a package's arguments) must also be plain tensors of the same dtype and device, or plain ints.

   A part of host_graph.c, which includes it. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Py_ssize_t inputs;
    void **at;         /* per input, if it is fixed */
    PyObject *kinds;   /* a letter per input */
    PyObject *wanted;  /* per input: a number; None, or a tensor's sizes and strides */
    PyObject *use_count, *storages; /* a function; (its argument, its result when nothing else holds the storage, the storage) */
    PyObject *copy;    /* a function of the list, which copies the inputs that are not fixed; None: there are none */
    PyObject *launch;  /* a function of nothing */
    PyObject *outputs; /* see make_output */
    struct Like { int32_t checks, dtype, type, index; } *like; /* per input; checks 0: not looked at */
    PyObject *owner;   /* released last: what the launched kernels are in */
    int32_t device;    /* of the stream; -1: there is none */
    void *stream;
    int busy; /* under the GIL, which `launch` releases */
} Replay;

enum { INPUT_FIXED = 'f', INPUT_COPIED = 'c', INPUT_NUMBER = 'n', INPUT_ANY = '-' /* is not read */ };

static int is_on_its_stream(const Replay *r) {
    void *stream = NULL;
    int status = 0;
    if (r->device < 0) return 1;
    if (torch_table.current_stream(r->device, &stream) || stream != r->stream || need_driver()) return 0;
    return !cuda.StreamIsCapturing || (!cuda.StreamIsCapturing((CUstream)stream, &status) && !status);
}

/* Fills in what `o` is; false if it is no plain tensor. */
static int describe(PyObject *o, struct Like *l) {
    Handle h = borrow(o);
    return l->checks = is_plain(o) && !torch_table.dtype(h, &l->dtype) && !torch_table.device_type(h, &l->type) &&
                       !torch_table.device_index(h, &l->index);
}

static int is_like(PyObject *o, const struct Like *l) {
    struct Like is = {0};
    return describe(o, &is) && is.dtype == l->dtype && is.type == l->type && is.index == l->index;
}

static int has_inputs(const Replay *r, PyObject *list) {
    const char *kinds = PyBytes_AS_STRING(r->kinds);
    if (PyList_GET_SIZE(list) != r->inputs) return 0;
    for (Py_ssize_t i = 0; i < r->inputs; ++i) {
        PyObject *o = PyList_GET_ITEM(list, i), *wanted = PyTuple_GET_ITEM(r->wanted, i);
        if (kinds[i] == INPUT_ANY) continue;
        if (kinds[i] == INPUT_NUMBER) {
            if (r->like[i].checks && !PyLong_CheckExact(o)) return 0;
            int same = PyObject_RichCompareBool(o, wanted, Py_EQ);
            if (same != 1) return same;
            continue;
        }
        void *p = NULL;
        if (!PyObject_TypeCheck(o, tensor_type) || (r->like[i].checks && !is_like(o, &r->like[i]))) return 0;
        if (kinds[i] == INPUT_FIXED && (torch_table.data_ptr(borrow(o), &p) || p != r->at[i])) return 0;
        if (wanted != Py_None && !is_laid_out(borrow(o), wanted)) return 0;
    }
    return 1;
}

/* Is nothing alive of what the last replay returned? -1: an exception is set. */
static int is_free(const Replay *r) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(r->storages); ++i) {
        PyObject *pair = PyTuple_GET_ITEM(r->storages, i);
        PyObject *uses = PyObject_CallOneArg(r->use_count, PyTuple_GET_ITEM(pair, 0));
        int same = uses ? PyObject_RichCompareBool(uses, PyTuple_GET_ITEM(pair, 1), Py_EQ) : -1;
        Py_XDECREF(uses);
        if (same != 1) return same;
    }
    return 1;
}

/* From a tensor: another one in its memory; from a number: that input; from (value,): the value; from a function: its
   result for the inputs. */
static PyObject *make_output(PyObject *how, PyObject *list) {
    if (PyLong_Check(how)) return Py_NewRef(PyList_GET_ITEM(list, PyLong_AsSsize_t(how)));
    if (PyTuple_Check(how)) return Py_NewRef(PyTuple_GET_ITEM(how, 0));
    if (!PyObject_TypeCheck(how, tensor_type)) return PyObject_CallOneArg(how, list);
    Handle held = borrow(how), mine = NULL;
    int64_t dim, *sizes, *strides;
    PyObject *made = NULL;
    if (!torch_table.dim(held, &dim) && !torch_table.sizes(held, &sizes) && !torch_table.strides(held, &strides) &&
        !torch_table.reinterpret(held, dim, sizes, strides, 0, &mine)) {
        made = wrap(mine);
        torch_table.delete_handle(mine);
    }
    if (!made && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "an output of a recording cannot be made");
    return made;
}

/* Without gradients: an input that requires them would be kept by what it was copied to. */
static PyObject *replayed(Replay *r, PyObject *list) {
    PyObject *done = r->copy == Py_None ? Py_NewRef(Py_None) : PyObject_CallOneArg(r->copy, list);
    if (done) Py_SETREF(done, PyObject_CallNoArgs(r->launch));
    if (!done) return NULL;
    Py_DECREF(done);
    Py_ssize_t n = PyTuple_GET_SIZE(r->outputs);
    PyObject *all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; ++i) {
        PyObject *made = make_output(PyTuple_GET_ITEM(r->outputs, i), list);
        if (made) PyTuple_SET_ITEM(all, i, made);
        else Py_CLEAR(all);
    }
    if (all && PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL)) Py_CLEAR(all);
    return all;
}

static PyObject *replay_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Replay *r = (Replay *)self;
    if (PyVectorcall_NARGS(nargsf) != 1 || !PyList_CheckExact(args[0]) || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "a recording takes one list, which it empties");
    if (r->busy) Py_RETURN_NONE;
    r->busy = 1;
    PyObject *all = NULL;
    int fits = is_on_its_stream(r) ? has_inputs(r, args[0]) : 0;
    if (fits == 1) fits = is_free(r);
    if (fits == 1) {
        Modes modes = eager.grad_is_enabled ? modes_off() : (Modes){0};
        all = replayed(r, args[0]);
        modes_back(modes);
    } else if (!fits) all = Py_NewRef(Py_None);
    r->busy = 0;
    return all;
}

/* -- making one --------------------------------------------------------------------------------------------------- */
static void replay_dealloc(PyObject *self) {
    Replay *r = (Replay *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyMem_RawFree(r->at), PyMem_RawFree(r->like);
    Py_XDECREF(r->kinds), Py_XDECREF(r->wanted), Py_XDECREF(r->use_count), Py_XDECREF(r->storages);
    Py_XDECREF(r->copy), Py_XDECREF(r->launch), Py_XDECREF(r->outputs), Py_XDECREF(r->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef replay_members[] = {VECTORCALL(Replay), {NULL}};
static PyTypeObject *replay_type;

/* replay(kinds, addresses, wanted, like, use_count, storages, copy, launch, outputs, owner, device, stream) -> Replay
   like: per input, one that it must be like; None: it is not checked. */
static PyObject *make_replay(PyObject *module, PyObject *args) {
    PyObject *kinds, *at, *wanted, *like, *use_count, *storages, *copy, *launch, *outputs, *owner;
    int device;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "SO!O!O!OO!OOO!OiK", &kinds, &PyTuple_Type, &at, &PyTuple_Type, &wanted, &PyTuple_Type,
                          &like, &use_count, &PyTuple_Type, &storages, &copy, &launch, &PyTuple_Type, &outputs, &owner,
                          &device, &stream))
        return NULL;
    Py_ssize_t n = PyBytes_GET_SIZE(kinds);
    if (PyTuple_GET_SIZE(at) != n || PyTuple_GET_SIZE(wanted) != n || PyTuple_GET_SIZE(like) != n)
        return PyErr_Format(PyExc_ValueError, "a letter, an address, a layout and a likeness per input");
    Replay *r = PyObject_New(Replay, replay_type);
    if (!r) return NULL;
    memset((char *)r + sizeof(PyObject), 0, sizeof(Replay) - sizeof(PyObject));
    r->vectorcall = replay_call, r->inputs = n, r->device = device, r->stream = (void *)(uintptr_t)stream;
    r->kinds = Py_NewRef(kinds), r->wanted = Py_NewRef(wanted), r->use_count = Py_NewRef(use_count);
    r->storages = Py_NewRef(storages), r->copy = Py_NewRef(copy), r->launch = Py_NewRef(launch);
    r->outputs = Py_NewRef(outputs), r->owner = Py_NewRef(owner);
    r->at = PyMem_RawCalloc(n + 1, sizeof(void *)), r->like = PyMem_RawCalloc(n + 1, sizeof *r->like);
    if (!r->at || !r->like) PyErr_NoMemory();
    for (Py_ssize_t i = 0; r->at && r->like && i < n; ++i) {
        PyObject *one = PyTuple_GET_ITEM(like, i);
        r->at[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(at, i));
        if (one == Py_None) continue;
        r->like[i].checks = 1;
        if (PyObject_TypeCheck(one, tensor_type) && (!eager.is_neg || !describe(one, &r->like[i])))
            PyErr_SetString(PyExc_ValueError, "an input is no plain tensor");
    }
    if (PyErr_Occurred()) Py_CLEAR(r);
    return (PyObject *)r;
}
