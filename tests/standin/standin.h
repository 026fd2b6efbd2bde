// What the parts of the stand-in share. standin.py says what it is.
//
//   memory.cpp       the memory of the devices and of pinned buffers, streams, and what makes the host wait
//   operations.cpp   tensors on the devices, and every operation on them
//   module.cpp       collectives, and the functions that Python calls

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <unordered_map>

namespace standin {

constexpr auto TYPE = c10::DeviceType::CUDA;
constexpr auto KEY = c10::DispatchKey::CUDA;

// Returns the environment's number of that name, or `otherwise`.
int64_t number(const char* name, int64_t otherwise);

const int DEVICES = static_cast<int>(number("STANDIN_DEVICES", 1));
const int64_t LIMIT = number("STANDIN_MEMORY", int64_t(1) << 40);  // bytes of each device
const bool NO_FLOAT64 = number("STANDIN_NO_FLOAT64", 0) != 0;      // as Apple's GPUs

// -- the process ----------------------------------------------------------------------------------------------------------------

// Raises where the device cannot be used: after an error that sticks, and in a fork of a process that used it.
void touch();
bool bad_fork();
bool used();

// -- devices and streams --------------------------------------------------------------------------------------------------------

c10::DeviceIndex current();
void set_current(int index);  // below 0: leaves it; raises at an index that there is none of

struct At {  // makes a device the current one
  explicit At(int index) : before(current()) { set_current(index); }
  ~At() { set_current(before); }
  c10::DeviceIndex before;
};

// How much of each stream has ended for whoever holds the clock. A device has the streams (index << 32) + 0, 1, ...
using Clock = std::unordered_map<int64_t, int64_t>;

int64_t stream_of(int device);  // the current one
c10::Stream as_torch(int64_t stream);
int64_t as_ours(const c10::Stream& stream);
int64_t new_stream(int device);
int64_t exchange_stream(int64_t stream);  // makes it its device's current one; the former
Clock recorded(int64_t stream);           // what an event holds
void wait_on_device(int64_t stream, const Clock& event);
bool has_ended(const Clock& event);  // false once, if nothing has made the host wait for it: polling ends, and is no wait

// An operation of the device's current stream: raises if it reads what another stream may still be writing, or writes what
// another may still be using. `reads` and `writes` are the beginnings of storages.
void operation(int device, const std::vector<const void*>& reads, const std::vector<const void*>& writes);
void in_use_by(const void* storage, int64_t stream);  // Tensor.record_stream

// -- the host waits, and copies that have not ended yet -------------------------------------------------------------------------

void wait_for_stream(int64_t stream, const std::string& why);
void wait_for_event(const Clock& event, const std::string& why);
void wait_for_device(int device, const std::string& why);

// A copy of pinned `host` that goes on: to it (`bytes` arrive when it has ended) or from it (`bytes` are what it may not change from).
void goes_on(at::Tensor host, std::string bytes, bool arriving, int device);

extern std::function<void(const std::string&)> on_wait;  // called with the reason of each wait, if it is set
int64_t waits();
int64_t copies_going_on();

// -- memory ---------------------------------------------------------------------------------------------------------------------

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
void register_memory();
bool is_pinned(const void* data);
int64_t pinned_bytes();  // taken from the system, with what torch keeps for later

// Counts what an operation has made as memory of the device; raises if that has no room for it.
void charge(const void* storage, size_t bytes, int device);
void discharge(const void* storage);

struct Peak {
  int64_t now, peak, allocations;
};
Peak memory(int device);

// -- tensors --------------------------------------------------------------------------------------------------------------------

inline bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == TYPE; }
at::Tensor on_cpu(const at::Tensor& t);  // the same memory as a tensor of the CPU
void resize_storage(c10::Storage storage, size_t bytes);
at::Generator& generator_of(int device);
void put_hooks_in_place();

}  // namespace standin
