#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

namespace standin {

// -- random numbers: a CPU generator for each device ----------------------------------------------------------------------------

namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index, at::Generator inner = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(TYPE, index), c10::DispatchKeySet(KEY)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), inner.clone()); }
  at::Generator inner;
};

// Lends the state of a device's generator to the CPU's default one, of which all CPU kernels draw.
struct Lent {
  explicit Lent(at::Generator from) : device(std::move(from)), cpu(at::detail::getDefaultCPUGenerator()), held(mutex()) {
    kept = cpu.get_state();
    cpu.set_state(device.get_state());
  }
  ~Lent() {
    device.set_state(cpu.get_state());
    cpu.set_state(kept);
  }
  static std::recursive_mutex& mutex() {
    static auto* it = new std::recursive_mutex();
    return *it;
  }
  at::Generator device, cpu;
  std::lock_guard<std::recursive_mutex> held;
  at::Tensor kept;
};

}  // namespace

at::Generator& generator_of(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < DEVICES; i++) made->push_back(at::make_generator<DeviceGenerator>(c10::DeviceIndex(i)));
    return made;
  }();
  return all->at(device < 0 ? current() : device);
}

// -- tensors: the same memory under another device ------------------------------------------------------------------------------

namespace {

void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(
      !NO_FLOAT64 || type != at::kDouble, "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.");
}

at::Tensor tensor_of(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

void drop(void* storage) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage)); }

void drop_charged(void* storage) {
  discharge(static_cast<c10::StorageImpl*>(storage)->data());
  drop(storage);
}

c10::Storage shown(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator, c10::DeleterFnPtr deleter = &drop) {
  auto* held = storage.getWeakStorageImpl().lock().release();  // as long as either lives
  return {
      c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(storage.mutable_data(), held, deleter, device), allocator, true};
}

// What a CPU kernel has made becomes memory of the device.
c10::Storage taken_over(const c10::Storage& storage, c10::Device device) {
  if (storage.nbytes() != 0) charge(storage.data(), storage.nbytes(), device.index());
  return shown(storage, device, device_memory(), &drop_charged);
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& t) {
  return tensor_of(shown(t.storage(), c10::Device(c10::DeviceType::CPU), c10::GetCPUAllocator()), c10::DispatchKey::CPU, t);
}

// -- every operation ------------------------------------------------------------------------------------------------------------

namespace {

// The host must know the outcome of these, so a GPU is waited for.
const std::unordered_set<std::string> WAITING{
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::_unique",
    "aten::unique_consecutive", "aten::bincount", "aten::histc", "aten::repeat_interleave", "aten::is_nonzero",
    "aten::linalg_cond", "aten::_linalg_eigh", "aten::linalg_eig", "aten::_linalg_svd", "aten::linalg_lstsq",
};
// These take tensors of the CPU, such as indices, beside those of a GPU.
const std::unordered_set<std::string> MIXED{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_amp_foreach_non_finite_check_and_unscale_",
    "aten::_fused_adamw_", "aten::_fused_adam_",
};
// These wait if they are given a mask (aten::index asks aten::nonzero itself).
const std::unordered_set<std::string> MASKED{"aten::index_put_", "aten::_index_put_impl_"};

// One call of an operation: its arguments as the CPU sees them, and its results as the device does.
struct Call {
  struct Argument {
    at::Tensor device, cpu;
    bool written;
  };
  const std::string& name;
  std::vector<Argument> arguments;
  std::optional<c10::Device> device;
  std::optional<at::Generator> generator;
  bool strangers = false;  // tensors of the CPU that are no single numbers
  std::vector<at::Tensor> fresh;

  at::Tensor enter(const at::Tensor& t, bool written) {
    if (!t.defined()) return t;
    TORCH_CHECK(t.layout() == at::kStrided, "stand-in: ", name, " of a tensor that is not strided");
    if (!ours(t)) {
      strangers |= t.dim() > 0 && t.device().type() == c10::DeviceType::CPU;
      return t;
    }
    TORCH_CHECK(
        !device || *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device,
        " and ", t.device(), "! (when checking ", name, ")");
    device = t.device();
    for (auto& argument : arguments) {
      if (argument.device.is_same(t)) {
        argument.written |= written;
        return argument.cpu;
      }
    }
    arguments.push_back({t, on_cpu(t), written});
    return arguments.back().cpu;
  }

  c10::IValue enter(const c10::IValue& value, bool written) {
    if (value.isTensor()) return enter(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& t : value.toTensorList()) made.push_back(enter(t, written));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        made.push_back(t ? std::optional<at::Tensor>(enter(*t, written)) : std::nullopt);
      }
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      auto wanted = value.toDevice();
      device = c10::Device(TYPE, wanted.has_index() ? wanted.index() : current());
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator()) {
      auto given = value.toGenerator();
      TORCH_CHECK(given.device().type() == TYPE, "Expected a 'cuda' device type for generator but found '", given.device().type(), "'");
      generator = given;
      return {};
    }
    return value;
  }

  // An argument given as out= may have been made larger.
  void grow() {
    for (auto& [to, from, written] : arguments) {
      if (!written) continue;
      if (from.storage().data() != to.storage().data() || from.storage().nbytes() != to.storage().nbytes()) {
        auto* storage = to.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(taken_over(from.storage(), to.device()).set_data_ptr(c10::DataPtr()));
        storage->set_nbytes(from.storage().nbytes());
      }
      if (from.sizes() != to.sizes() || from.strides() != to.strides() || from.storage_offset() != to.storage_offset()) {
        to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
      }
    }
  }

  at::Tensor leave(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
    for (auto& argument : arguments) {
      if (argument.cpu.is_same(t)) return argument.device;
    }
    for (auto& argument : arguments) {
      if (argument.cpu.storage().is_alias_of(t.storage())) return tensor_of(argument.device.storage(), KEY, t);  // a view
    }
    for (auto& other : fresh) {
      if (other.storage().data() == t.storage().data() && t.storage().nbytes() != 0) return tensor_of(other.storage(), KEY, t);
    }
    check_type(t.scalar_type());
    fresh.push_back(tensor_of(taken_over(t.storage(), *device), KEY, t));
    return fresh.back();
  }

  c10::IValue leave(const c10::IValue& value) {
    if (value.isTensor()) return leave(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorList()) made.push_back(leave(t));
    return made;
  }

  void order() const {  // among the streams
    std::vector<const void*> reads, writes;
    for (auto& argument : arguments) (argument.written ? writes : reads).push_back(argument.device.storage().data());
    operation(device->index(), reads, writes);
  }
};

// Shows the memory of the arguments to the CPU's kernel, and wraps what comes back.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  touch();
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  Call call{schema.name()};
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    value = call.enter(value, alias != nullptr && alias->isWrite());
  }
  TORCH_CHECK(call.device, "stand-in: ", call.name, " has no tensor of a device");
  TORCH_CHECK(
      !call.strangers || MIXED.count(call.name) != 0, "Expected all tensors to be on the same device, but found at least two devices, ",
      *call.device, " and cpu! (when checking ", call.name, ")");
  call.order();
  const auto stream = stream_of(call.device->index());
  if (WAITING.count(call.name) != 0) wait_for_stream(stream, call.name);
  if (MASKED.count(call.name) != 0) {
    for (const std::optional<at::Tensor>& t : (*stack)[begin + 1].toOptionalTensorList()) {
      const bool mask = t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
      if (mask) wait_for_stream(stream, call.name + " by a mask");
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::unique_ptr<Lent> lent;
    if (call.generator || op.hasTag(at::Tag::nondeterministic_seeded)) {
      lent = std::make_unique<Lent>(call.generator ? *call.generator : generator_of(call.device->index()));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.grow();
  const size_t returns = schema.returns().size(), first = stack->size() - returns;
  for (size_t i = 0; i < returns; i++) (*stack)[first + i] = call.leave((*stack)[first + i]);
  if (!call.fresh.empty()) {
    std::vector<const void*> made;
    for (auto& t : call.fresh) made.push_back(t.storage().data());
    operation(call.device->index(), {}, made);
  }
}

// -- operations of the device's own ---------------------------------------------------------------------------------------------

int index_of(std::optional<c10::Device> device) { return device && device->has_index() ? device->index() : current(); }

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  At at(index_of(device));
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  check_type(type);
  return at::detail::empty_strided_generic(size, stride, device_memory(), c10::DispatchKeySet(KEY), type);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  At at(index_of(device));
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  check_type(type);
  return at::detail::empty_generic(size, device_memory(), c10::DispatchKeySet(KEY), type, format);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  touch();
  at::AutoDispatchBelowADInplaceOrView below;
  if (ours(to) && ours(from)) {
    const auto device = from.device().index();
    if (to.device() != from.device()) wait_on_device(stream_of(to.device().index()), recorded(stream_of(device)));  // as PyTorch does
    operation(to.device().index(), {from.storage().data()}, {to.storage().data()});
    on_cpu(to).copy_(on_cpu(from));
    return to;
  }
  const bool arrives = ours(to);
  const auto& host = arrives ? from : to;
  const auto& here = arrives ? to : from;
  TORCH_CHECK(host.device().type() == c10::DeviceType::CPU, "stand-in: a copy between ", to.device(), " and ", from.device());
  const auto device = here.device().index();
  const std::vector<const void*> used{here.storage().data()}, none;
  operation(device, arrives ? none : used, arrives ? used : none);
  // A copy does not make the host wait only if the host's memory is pinned and in one piece, as cudaMemcpyAsync has it.
  if (!non_blocking || host.numel() == 0 || !host.is_contiguous() || !is_pinned(host.data_ptr())) {
    const std::string way = arrives ? "copy to the device" : "copy from the device";
    const std::string unpinned = arrives ? " from memory that is not pinned" : " to memory that is not pinned";
    wait_for_stream(stream_of(device), non_blocking ? way + unpinned : way);
    arrives ? on_cpu(to).copy_(from) : to.copy_(on_cpu(from));
    return to;
  }
  if (arrives) {
    on_cpu(to).copy_(from);
    goes_on(host, {static_cast<const char*>(host.data_ptr()), host.nbytes()}, false, device);
    return to;
  }
  auto values = at::empty_like(to, at::TensorOptions().pinned_memory(false));
  values.copy_(on_cpu(from));
  goes_on(host, {static_cast<const char*>(values.data_ptr()), values.nbytes()}, true, device);
  std::memset(to.data_ptr(), 0xFF, to.nbytes());  // NaN until it has arrived
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  operation(self.device().index(), {self.storage().data()}, {});
  wait_for_stream(stream_of(self.device().index()), "item");
  return on_cpu(self).item();
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto layout = at::empty(size, self.options().device(at::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous)));
  const size_t needed = (layout.numel() + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes(), layout.strides(), self.storage_offset());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto none = at::empty({0}, self.options());
  return set_tensor(self, none);
}

void record_stream(at::Tensor& self, c10::Stream stream) { in_use_by(self.storage().data(), as_ours(stream)); }

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;  // the composite one
}

}  // namespace

void resize_storage(c10::Storage storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  At at(storage.device().index());
  auto made = device_memory()->allocate(bytes);
  if (const size_t kept = std::min(bytes, impl->nbytes())) std::memcpy(made.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &plain_attention);
  // Of these there is a composite one too, whose bits differ from the CPU's kernel.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// -- what PyTorch asks a device -------------------------------------------------------------------------------------------------

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current()}; }
  void setDevice(c10::Device d) const override { set_current(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current(d.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(DEVICES); }

  c10::Stream getStream(c10::Device d) const override { return as_torch(stream_of(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return as_torch(int64_t(index_of(d)) << 32); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return as_torch(new_stream(d.index())); }
  c10::Stream getNewStream(c10::Device d, int) const override { return as_torch(new_stream(d.index())); }
  c10::Stream exchangeStream(c10::Stream s) const override { return as_torch(exchange_stream(as_ours(s))); }
  bool queryStream(const c10::Stream& s) const override { return has_ended(recorded(as_ours(s))); }
  void synchronizeStream(const c10::Stream& s) const override { wait_for_stream(as_ours(s), "synchronize a stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(device, "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& at, const c10::Stream& s) const override { in_use_by(at.get(), as_ours(s)); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock();
    *static_cast<Clock*>(*event) = recorded(as_ours(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) wait_on_device(as_ours(s), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || has_ended(*static_cast<Clock*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for_event(*static_cast<Clock*>(event), "synchronize an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

}  // namespace

}  // namespace standin

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, standin::Guard);
}

namespace at {
struct StandInHooks final : CUDAHooksInterface {
  explicit StandInHooks(CUDAHooksArgs) {}
  void init() const override { standin::touch(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return standin::DEVICES > 0; }
  bool hasCUDA() const override { return standin::DEVICES > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return standin::used(); }
  const Generator& getDefaultGenerator(DeviceIndex i) const override { return standin::generator_of(i); }
  Generator getNewGenerator(DeviceIndex i) const override {
    return make_generator<standin::DeviceGenerator>(i < 0 ? standin::current() : i);
  }
  Device getDeviceFromPtr(void*) const override { return {standin::TYPE, standin::current()}; }
  bool isPinnedPtr(const void* data) const override { return standin::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return standin::pinned_memory(); }
  Allocator* getCUDADeviceAllocator() const override { return standin::device_memory(); }
  DeviceIndex current_device() const override { return standin::current(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(standin::DEVICES); }
  int getNumGPUs() const override { return standin::DEVICES; }
  void setCurrentDevice(DeviceIndex i) const override { standin::set_current(i); }
  DeviceIndex getCurrentDevice() const override { return standin::current(); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto before = standin::current();
    standin::set_current(i);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  void deviceSynchronize(DeviceIndex i) const override { standin::wait_for_device(i, "synchronize"); }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", StandInHooks);

// PyTorch makes its hooks when they are first asked for, which may have been before this library was loaded. They are a table of
// functions and nothing else, so ours can be put in their place.
void put_in_place() {
  static_assert(sizeof(StandInHooks) == sizeof(CUDAHooksInterface));
  auto* hooks = const_cast<CUDAHooksInterface*>(&detail::getCUDAHooks());
  if (dynamic_cast<StandInHooks*>(hooks) == nullptr) new (hooks) StandInHooks(CUDAHooksArgs{});
}
}  // namespace at

void standin::put_hooks_in_place() { at::put_in_place(); }
