// A device whose memory the host cannot reach, on a CPU: see `__init__.py`.
//
// [Note: addresses] Two regions of the address space have one size. Tensors of the device have addresses in the first,
// which no access is allowed to: code of the host that follows such an address ends with SIGSEGV, as with a GPU. The
// bytes are at the same offset in the second region, and kernels find them there.
//
// [Note: kernels] Each operator runs as its CPU kernel, on CPU tensors that are made of the same bytes. It is refused if
// tensors of the host with one dimension or more are among its inputs, as CUDA kernels refuse them.

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kDevice, 0);

// Memory --------------------------------------------------------------------------------------------------------------

constexpr size_t kRegion = size_t(1) << 40;
constexpr size_t kBlock = 512;  // bytes; all blocks are multiples of it, as with CUDA

std::atomic<int64_t> launches{0}, waits{0};
std::atomic<bool> may_wait{true};

void wait_for_device() {
  TORCH_CHECK(may_wait, "called a synchronizing operation: the host waits for the device");
  ++waits;
}

char* reserve(int protection) {
  void* found = mmap(nullptr, kRegion, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "cannot reserve address space");
  return static_cast<char*>(found);
}

struct Region {
  char *shown = reserve(PROT_NONE), *bytes = reserve(PROT_READ | PROT_WRITE);
};

Region& region() {
  static auto* one = new Region;
  return *one;
}

char* host(const void* address) {  // see [Note: addresses]
  return address ? region().bytes + (static_cast<const char*>(address) - region().shown) : nullptr;
}

void give_back(void*);

struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  size_t next = 0;
  std::map<size_t, std::vector<char*>> unused;
  std::unordered_map<void*, size_t> used;
  mutable c10::CachingDeviceAllocator::DeviceStats stats;

  c10::DataPtr allocate(size_t num_bytes) override {
    if (!num_bytes) return {nullptr, nullptr, &give_back, kOnly};
    std::lock_guard lock(mutex);
    const size_t size = (num_bytes + kBlock - 1) / kBlock * kBlock;
    auto& same = unused[size];
    char* found;
    if (same.empty()) {
      found = region().shown + next;
      next += size;
      TORCH_CHECK(next <= kRegion, "out of address space");
    } else {
      found = same.back();
      same.pop_back();
    }
    used[found] = size;
    memset(host(found), 0xff, size);  // NaN
    count(size, 1);
    return {found, found, &give_back, kOnly};
  }

  void free(void* address) {
    if (!address) return;
    std::lock_guard lock(mutex);
    const auto size = used.at(address);
    used.erase(address);
    memset(host(address), 0xff, size);
    unused[size].push_back(static_cast<char*>(address));
    count(size, -1);
  }

  void count(int64_t size, int sign) {
    for (auto* stat : {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.requested_bytes[0]})
      sign > 0 ? stat->increase(size) : stat->decrease(size);
    for (auto* stat : {&stats.allocation[0], &stats.active[0]}) sign > 0 ? stat->increase(1) : stat->decrease(1);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t count) const override { memcpy(host(to), host(from), count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    for (auto* stat : {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.requested_bytes[0]}) stat->reset_peak();
  }
};

Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

void give_back(void* address) { memory().free(address); }

struct Registered {
  Registered() { c10::SetAllocator(kDevice, &memory(), 0); }
} registered;

// Streams and devices -------------------------------------------------------------------------------------------------

// Everything runs at once. Streams have numbers, so that it can be seen which one is current.
struct Event {
  std::chrono::steady_clock::time_point when;
};

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream of(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, kOnly, id); }
  c10::Stream getStream(c10::Device) const override { return of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return of(++streams); }
  c10::Stream getNewStream(c10::Device, int) const override { return of(++streams); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = of(current);
    current = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->when = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device(); }
  void synchronizeEvent(void*) const override { wait_for_device(); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->when - static_cast<Event*>(first)->when)
        .count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random numbers ------------------------------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Random(at::Generator inner)
      : GeneratorImpl(kOnly, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override { return new Random(inner.clone()); }
};

at::Generator new_generator() { return at::make_generator<Random>(at::detail::createCPUGenerator()); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return kOnly; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* one = new at::Generator(new_generator());
    return *one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory().allocate(size);
    if (const auto kept = std::min(size, storage.nbytes())) memcpy(host(fresh.get()), host(storage.data()), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

struct Hooked {
  Hooked() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} hooked;

// Kernels -------------------------------------------------------------------------------------------------------------

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

at::Tensor seen_by_host(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  at::AutoDispatchBelowADInplaceOrView below;
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(host(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor to_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  const auto options = tensor.options().device(kOnly);
  auto there = tensor.is_non_overlapping_and_dense() ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                                     : at::empty(tensor.sizes(), options);
  if (tensor.numel()) seen_by_host(there).copy_(tensor);
  return there;
}

// What a kernel has done to the host's view of an output, which may have had to be resized.
void take_over(at::Tensor to, const at::Tensor& from) {
  if (to.numel() && from.data_ptr() == host(to.data_ptr()) && to.sizes() == from.sizes()) return;
  at::AutoDispatchBelowADInplaceOrView below;
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  if (to.numel()) seen_by_host(to).copy_(from);
}

const std::set<std::string> kTakesIndicesOfHost{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                "aten::_unsafe_index", "aten::index_put"};
const std::set<std::string> kWaits{"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                   "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave"};

void expect_same_device(const c10::OperatorHandle& op, const std::vector<at::Tensor>& all) {
  bool any = false;
  const at::Tensor* foreign = nullptr;
  for (const auto& tensor : all) {
    if (!tensor.defined()) continue;
    if (is_here(tensor)) any = true;
    else if (tensor.dim()) foreign = &tensor;
  }
  TORCH_CHECK(!any || !foreign || kTakesIndicesOfHost.count(op.schema().name()),
              "Expected all tensors to be on the same device, but found at least two devices, ", kOnly, " and ",
              foreign ? foreign->device() : kOnly, ": ", op.schema().name());
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  ++launches;
  if (kWaits.count(schema.name())) wait_for_device();
  const auto first = stack->size() - schema.arguments().size();
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::vector<at::Tensor> all;
  for (auto index = first; index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      all.push_back(value.toTensor());
      if (is_here(all.back())) value = seen_by_host(all.back());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        all.push_back(tensor);
        if (is_here(tensor)) tensor = seen_by_host(tensor);
      }
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        if (one.has_value()) all.push_back(*one);
        list.push_back(one.has_value() && is_here(*one) ? std::optional<at::Tensor>(seen_by_host(*one)) : one);
      }
      value = c10::IValue(list);
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      const auto of = value.toGenerator().device();
      TORCH_CHECK(of.type() == kDevice, "Expected a generator of ", kOnly, ", found one of ", of, ": ", schema.name());
      value = static_cast<Random*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
    }
  }
  expect_same_device(op, all);
  const std::vector<c10::IValue> seen(stack->begin() + first, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t index = 0; index < given.size(); ++index) {  // outputs that are arguments
    const auto* alias = schema.arguments()[index].alias_info();
    if (!alias || !alias->isWrite()) continue;
    if (given[index].isTensor() && is_here(given[index].toTensor())) {
      take_over(given[index].toTensor(), seen[index].toTensor());
    } else if (given[index].isTensorList()) {
      const auto to = given[index].toTensorVector(), from = seen[index].toTensorVector();
      for (size_t one = 0; one < to.size(); ++one)
        if (is_here(to[one])) take_over(to[one], from[one]);
    }
  }
  const auto& returns = schema.returns();
  for (size_t index = 0; index < returns.size(); ++index) {
    auto& value = (*stack)[stack->size() - returns.size() + index];
    const auto* alias = returns[index].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t argument = 0; argument < given.size(); ++argument) {
        const auto* of_argument = schema.arguments()[argument].alias_info();
        if (of_argument && of_argument->isWrite() && *of_argument == *alias) value = given[argument];
      }
    } else if (value.isTensor()) {
      TORCH_CHECK(!alias, "no kernel for a view: ", schema.name());
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      TORCH_CHECK(!alias, "no kernel for views: ", schema.name());
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = to_device(tensor);
      value = c10::IValue(list);
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void make_room(const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                                       tensor.storage_offset());
  if (tensor.numel() && needed > tensor.storage().nbytes()) at::native::resize_bytes_nocuda(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device().type() == kDevice, "set_: expected a storage on ", kOnly, ", found ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() || size.empty()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  make_room(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  ++launches;
  if (is_here(self) != is_here(to) && !non_blocking) wait_for_device();
  const auto from = is_here(self) ? seen_by_host(self) : self;
  (is_here(to) ? seen_by_host(to) : to).copy_(from);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar number(const at::Tensor& self) {
  wait_for_device();
  return seen_by_host(self).item();
}

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &number);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Autocast, boxed: one function for each of the three lists of operations of torch. (A function of its own for each
// operation, as torch's macros make them, takes as long to compile as all of the rest.)
enum class Casts { kLower, kFp32, kWidest };

template <Casts CASTS>
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  const size_t first = stack->size() - op.schema().arguments().size();
  auto dtype = CASTS == Casts::kFp32 ? at::kFloat : at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  const auto of_each = [&](const auto& act) {
    for (size_t i = first; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor() && value.toTensor().defined()) value = act(value.toTensor());
      if (!value.isTensorList()) continue;
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = act(tensor);
      value = tensors;
    }
  };
  if (CASTS == Casts::kWidest)
    of_each([&](const at::Tensor& tensor) { return dtype = at::autocast::prioritize(dtype, tensor, kDevice), tensor; });
  of_each([&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); });
  op.callBoxed(stack);
}

#define NAME_OF(OP, ...) "aten::" #OP __VA_OPT__("." #__VA_ARGS__)
#define CAST(CASTS, NAME) m.impl(NAME, torch::CppFunction::makeFromBoxedFunction<&cast_and_call<Casts::CASTS>>());
#define LOWER(...) CAST(kLower, NAME_OF(__VA_ARGS__))
#define FP32(...) CAST(kFp32, NAME_OF(__VA_ARGS__))
#define PROMOTE(...) CAST(kWidest, NAME_OF(__VA_ARGS__))
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

// Since the process began: operations that were launched, and how often the host has waited for the device.
extern "C" int64_t apart_launches() { return launches; }
extern "C" int64_t apart_waits() { return waits; }

// Whether the host may wait for the device, as `torch.cuda.set_sync_debug_mode` says; returns what was before.
extern "C" bool apart_let_wait(bool may) { return may_wait.exchange(may); }
