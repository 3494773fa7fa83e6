/* The callable of a compiled program: its arguments (tensors and ints, by position) go to its graph after `head`, the
   parameters and buffers.

   Only the usual call is made here (the fast path). All others go to `slow`, which gets the same arguments: it copies
   tensors that only have other strides, and raises an error for what does not fit. So does a call that the graph
   rejects, which has done nothing yet.

   A part of host_graph.c, which includes it. */
#include <stdbool.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Graph *graph;
    PyObject *head, *kinds, *slow; /* a tuple; bytes, a letter per argument; a callable */
    int one;                       /* is the result the graph's one output, not a tuple? */
} Entry;

enum { KIND_TENSOR = 't', KIND_INT = 'i', KIND_ANY = '-' }; /* the last: the graph does not read it */

static PyTypeObject *parameter_type;
static struct {
    bool (*grad_is_enabled)(void);
    void (*set_grad_enabled)(bool);
    int32_t (*layout)(Handle, int32_t *);
    int32_t (*strided)(void);
    bool (*is_neg)(Handle); /* at::native::is_neg(const at::Tensor &) */
    int32_t (*offset)(Handle, int64_t *); /* of its first element in the storage */
    int32_t (*held)(Handle, int64_t *);   /* bytes of the storage */
    bool (*autocasts)(int8_t); /* at::autocast::is_autocast_enabled(c10::DeviceType) */
    void (*set_autocasts)(int8_t, bool);
} eager;
enum { DEVICE_CPU = 0, DEVICE_CUDA = 1 }; /* c10::DeviceType */

/* -- modes of the calling thread --------------------------------------------------------------------------------- */
typedef struct {
    bool grad, cpu, cuda; /* gradients; autocast on either device */
} Modes;

/* Off while the graph runs, which was compiled without them. (Under autocast, its calls of PyTorch would return other
   dtypes than its kernels were compiled for.) */
static Modes modes_off(void) {
    Modes m = {eager.grad_is_enabled(), eager.autocasts(DEVICE_CPU), eager.autocasts(DEVICE_CUDA)};
    if (m.grad) eager.set_grad_enabled(false);
    if (m.cpu) eager.set_autocasts(DEVICE_CPU, false);
    if (m.cuda) eager.set_autocasts(DEVICE_CUDA, false);
    return m;
}

static void modes_back(Modes m) {
    if (m.grad) eager.set_grad_enabled(true);
    if (m.cpu) eager.set_autocasts(DEVICE_CPU, true);
    if (m.cuda) eager.set_autocasts(DEVICE_CUDA, true);
}

/* -- is it a call for the fast path? ------------------------------------------------------------------------------- */
/* The bytes of a tensor, from its first element to its last. */
typedef struct {
    char *first, *end; /* equal: it is empty */
    int written;
} Extent;
enum { SOME_EXTENTS = 32, MOST_BYTES = 16 /* of an element */ };

static int64_t element_size(int32_t dtype) { /* by c10::ScalarType */
    static const char sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 4, 8,
                                 [44] = 1, 1}; /* (float8_e8m0fnu, float4_e2m1fn_x2) */
    return dtype >= 0 && dtype < (int32_t)sizeof sizes && sizes[dtype] ? sizes[dtype] : MOST_BYTES;
}

/* Fails if its storage does not hold all of them: it was resized since. */
static int extent(Handle h, Extent *e) {
    int32_t dtype = -1;
    int64_t dim = 0, *sizes = NULL, *strides = NULL, last = 0, offset = 0, held = 0;
    void *p = NULL;
    if (torch_table.data_ptr(h, &p) || torch_table.dtype(h, &dtype) || torch_table.dim(h, &dim) ||
        torch_table.sizes(h, &sizes) || torch_table.strides(h, &strides) || eager.offset(h, &offset) ||
        eager.held(h, &held))
        return -1;
    e->first = e->end = p;
    for (int64_t d = 0; d < dim; ++d) {
        if (!sizes[d]) return 0;
        last += (sizes[d] - 1) * strides[d];
    }
    e->end += (last + 1) * element_size(dtype);
    return p && (offset + last + 1) * element_size(dtype) <= held ? 0 : -1;
}

static int is_readable(Handle h, Extent *e) {
    int32_t layout = -1;
    return !eager.layout(h, &layout) && layout == eager.strided() && !eager.is_neg(h) && !extent(h, e);
}

/* An ordinary tensor with memory of its own (functorch's wrappers have none, nor do tensors known to be zero). The graph
   checks everything else. */
static int is_plain(PyObject *o) {
    if (Py_TYPE(o) != tensor_type && Py_TYPE(o) != parameter_type) return 0;
    Extent e;
    return is_readable(borrow(o), &e);
}

/* -- is it plain memory, which nothing else writes to? ------------------------------------------------------------- */
static int by_first(const void *a, const void *b) {
    const Extent *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Is one that is written to in the memory of another? */
static int overlap(Extent *all, Py_ssize_t n) {
    char *end = NULL, *written_end = NULL; /* of those before */
    qsort(all, n, sizeof *all, by_first);
    for (Py_ssize_t i = 0; i < n; ++i) {
        Extent e = all[i];
        if (e.first == e.end) continue;
        if (e.first < written_end || (e.written && e.first < end)) return 1;
        if (e.end > end) end = e.end;
        if (e.written && e.end > written_end) written_end = e.end;
    }
    return 0;
}

/* May two of its elements have one place? Some stride is within what the dimensions of smaller ones reach. */
static int is_folded(Handle h) {
    int64_t dim = 0, *sizes = NULL, *strides = NULL;
    if (torch_table.dim(h, &dim) || torch_table.sizes(h, &sizes) || torch_table.strides(h, &strides)) return 1;
    for (int64_t d = 0; d < dim; ++d) {
        int64_t reach = 0;
        for (int64_t k = 0; k < dim; ++k)
            if (strides[k] < strides[d] || (strides[k] == strides[d] && k < d)) reach += (sizes[k] - 1) * strides[k];
        if (sizes[d] > 1 && strides[d] <= reach) return 1;
    }
    return 0;
}

/* Has it these sizes and strides (a tuple of both; -1: any)? With any of them unknown, an empty tensor has not. */
static int is_laid_out(Handle h, PyObject *wanted) {
    int64_t dim = 0, *sizes = NULL, *strides = NULL;
    if (torch_table.dim(h, &dim) || torch_table.sizes(h, &sizes) || torch_table.strides(h, &strides)) return 0;
    if (PyTuple_GET_SIZE(wanted) != 2 * dim) return 0;
    int empty = 0, unknown = 0;
    for (int64_t d = 0; d < 2 * dim; ++d) {
        long long w = PyLong_AsLongLong(PyTuple_GET_ITEM(wanted, d)), is = d < dim ? sizes[d] : strides[d - dim];
        if (w != -1 && w != is) return 0;
        unknown |= w == -1, empty |= d < dim && !is;
    }
    return !(empty && unknown);
}

/* usual(args, kinds, layouts) -> bool: args: a list or tuple; the others: see host.checks */
static PyObject *usual(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !(PyList_Check(given[0]) || PyTuple_Check(given[0])) || !PyBytes_Check(given[1]) ||
        !PyTuple_Check(given[2]))
        return PyErr_Format(PyExc_TypeError, "usual(list or tuple, bytes, tuple)");
    Py_ssize_t n = PySequence_Fast_GET_SIZE(given[0]), found = 0;
    const char *kinds = PyBytes_AS_STRING(given[1]);
    Py_ssize_t layouts = PyTuple_GET_SIZE(given[2]); /* of all arguments, or none */
    if (n != PyBytes_GET_SIZE(given[1]) || (layouts && layouts != n)) Py_RETURN_FALSE;
    int good = 1, writes = memchr(kinds, 'w', n) != NULL;
    Extent some[SOME_EXTENTS], *all = some;
    if (writes && n > SOME_EXTENTS && !(all = PyMem_Malloc(n * sizeof *all))) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; good && i < n; ++i) {
        PyObject *o = PySequence_Fast_GET_ITEM(given[0], i);
        if (kinds[i] == '-' || !PyObject_TypeCheck(o, tensor_type)) continue;
        Handle h = borrow(o);
        Extent *e = &all[writes ? found++ : 0];
        good = is_readable(h, e);
        e->written = kinds[i] == 'w';
        good = good && !(e->written && e->first != e->end && is_folded(h));
        PyObject *wanted = layouts ? PyTuple_GET_ITEM(given[2], i) : Py_None;
        if (good && wanted != Py_None) good = is_laid_out(h, wanted);
    }
    if (good && writes) good = !overlap(all, found);
    if (all != some) PyMem_Free(all);
    return PyBool_FromLong(good);
}

static int is_usual(const Entry *e, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    if (n != PyBytes_GET_SIZE(e->kinds) || (kwnames && PyTuple_GET_SIZE(kwnames))) return 0;
    const char *kinds = PyBytes_AS_STRING(e->kinds);
    for (Py_ssize_t i = 0; i < n; ++i)
        if (kinds[i] == KIND_TENSOR ? !is_plain(args[i]) : kinds[i] == KIND_INT && !PyLong_CheckExact(args[i])) return 0;
    return 1;
}

static PyObject *entry_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Entry *e = (Entry *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (is_usual(e, args, n, kwnames)) {
        int refused = 0;
        Modes modes = modes_off();
        PyObject *all = run(e->graph, PySequence_Fast_ITEMS(e->head), PyTuple_GET_SIZE(e->head), args, n, NULL, &refused);
        modes_back(modes);
        if (!refused) {
            if (!all || !e->one) return all;
            PyObject *result = Py_NewRef(PyTuple_GET_ITEM(all, 0));
            Py_DECREF(all);
            return result;
        }
    }
    return PyObject_Vectorcall(e->slow, args, nargsf, kwnames);
}

/* -- making one --------------------------------------------------------------------------------------------------- */
/* `slow` is often a method of the object that holds the entry: a cycle. (Cleared there: an entry never changes.) */
static int entry_traverse(PyObject *self, visitproc visit, void *arg) {
    Entry *e = (Entry *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(e->graph);
    Py_VISIT(e->head);
    Py_VISIT(e->slow);
    return 0;
}

static void entry_dealloc(PyObject *self) {
    Entry *e = (Entry *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_DECREF(e->graph), Py_DECREF(e->head), Py_DECREF(e->kinds), Py_DECREF(e->slow);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef entry_members[] = {
    VECTORCALL(Entry),
    {"graph", T_OBJECT, offsetof(Entry, graph), READONLY, "the graph"},
    {NULL},
};
static PyTypeObject *entry_type;

/* entry(graph, head, kinds, one, slow) -> Entry: of `graph`, with `head` before its own arguments, which have a letter
   each in `kinds`. one: the result is the graph's only output, not the tuple. slow: the fallback for all other calls, and
   for arguments that the graph rejects. */
static PyObject *make_entry(PyObject *module, PyObject *args) {
    PyObject *graph, *head, *kinds, *slow;
    int one;
    if (!PyArg_ParseTuple(args, "O!O!SpO", graph_type, &graph, &PyTuple_Type, &head, &kinds, &one, &slow)) return NULL;
    const Graph *g = (Graph *)graph;
    Py_ssize_t count = PyBytes_GET_SIZE(kinds);
    if (!eager.is_neg) return PyErr_Format(PyExc_RuntimeError, "setup has no addresses for entries");
    if (PyTuple_GET_SIZE(head) + count != g->inputs || (one && g->outputs != 1))
        return PyErr_Format(PyExc_ValueError, "graph %U has %zd inputs and %zd outputs, not %zd and %zd%s", g->name,
                            g->inputs, g->outputs, PyTuple_GET_SIZE(head), count, one ? ", and one" : "");
    for (Py_ssize_t i = 0; i < count; ++i)
        if (!memchr((char[]){KIND_TENSOR, KIND_INT, KIND_ANY}, PyBytes_AS_STRING(kinds)[i], 3))
            return PyErr_Format(PyExc_ValueError, "unknown kind of argument: %R", kinds);
    Entry *e = PyObject_GC_New(Entry, entry_type);
    if (!e) return NULL;
    e->vectorcall = entry_call, e->one = one;
    e->graph = (Graph *)Py_NewRef(graph), e->head = Py_NewRef(head);
    e->kinds = Py_NewRef(kinds), e->slow = Py_NewRef(slow);
    PyObject_GC_Track(e);
    return (PyObject *)e;
}
