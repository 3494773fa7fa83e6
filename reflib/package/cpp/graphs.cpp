// Calls recorded as CUDA graphs (reflib's option cuda_graphs): the second call with the same arguments, at the same
// addresses and on the same stream, is captured on a stream of our own, and later ones are launched as one graph. A
// recording returns tensors in memory of its own, so it serves only while the caller has freed what it returned last;
// else another one is made, MOST in all. Every other call runs as without the option; so do those of a model that calls
// PyTorch, whose tensors do not say who else has their storage.
#include "runtime.h"

namespace runtime {
enum { MOST = 8, SEEN = 256 };

Recordings::~Recordings() {
  for (auto &r : made) forget(r.second);
}

void Recordings::forget(Recording &r) {
  if (r.graph) gpu->forget(r.graph);
  for (Value &v : r.outputs)
    if (v.kind == VALUE_TENSOR) torch().delete_handle(v.tensor);
}

// Is nothing else referring to what it returned? Its results are new handles then.
bool Recordings::replay(const Recording &r, void *stream, std::vector<Value> &out) {
  for (size_t i = 0; i < out.size(); ++i)
    if (r.outputs[i].kind == VALUE_TENSOR && uses(r.outputs[i].tensor) != r.uses[i]) return false;
  gpu->replay(r.graph, stream);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = r.outputs[i];
    if (out[i].kind == VALUE_TENSOR) torch().new_handle(r.outputs[i].tensor, &out[i].tensor);
  }
  return true;
}

void Recordings::ran(const Call &call) {
  std::lock_guard<std::mutex> guard(lock);
  if (made.size() >= MOST) return;
  if (seen.size() >= SEEN) seen.clear();
  seen.insert(call);
}

bool Recordings::run(void *stream, const Call &call, const Wrapper &wrapper, std::vector<Value> &out) {
  std::unique_lock<std::mutex> guard(lock, std::try_to_lock);
  if (!guard || failed || gpu->captures(stream)) return false;  // another thread's turn; the caller captures
  auto found = made.equal_range(call);
  for (auto r = found.first; r != found.second; ++r)
    if (replay(r->second, stream, out)) return true;
  if (made.size() >= MOST || !seen.count(call)) return false;
  Recording r;
  r.outputs.resize(out.size());
  void *lane = nullptr;
  if ((failed = caught([&] { lane = gpu->begin_capture(); }))) return false;
  int32_t rc = wrapper(lane, r.outputs.data());
  r.graph = gpu->end_capture(lane);
  for (Value &v : r.outputs) r.uses.push_back(v.kind == VALUE_TENSOR ? uses(v.tensor) : 0);
  failed = rc || !r.graph;
  if (failed) return forget(r), false;
  return replay(made.emplace(call, std::move(r))->second, stream, out);
}

}  // namespace runtime
