#include <stdint.h>
#include <stdexcept>
extern "C" int32_t rv_boom(void* x, void** out){ throw std::runtime_error("boom"); }