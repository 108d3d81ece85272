// What torch's CPU build lacks to hold real tensors whose device is "cuda": memory (the host's), views of it, generators,
// pinned memory, a device guard. Nothing here computes: operations.py does, on aliases of the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::Storage;
constexpr auto CUDA = DeviceType::CUDA;

thread_local DeviceIndex current = 0;

DeviceIndex count() {
  static const char* number = std::getenv("VIRTUAL_GPUS");
  return static_cast<DeviceIndex>(number ? std::atoi(number) : 1);
}

// ---- memory

// Memory of a tensor on cuda: that of a host storage, which lives as long. IPC handles of received memory cannot be sent.
template <bool received>
void let_go(void* storage) { delete static_cast<Storage*>(storage); }

c10::DataPtr on_device(Storage host, DeviceIndex index, bool received) {
  void* data = host.mutable_data();
  return {data, new Storage(std::move(host)), received ? &let_go<true> : &let_go<false>, Device(CUDA, index)};
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetAllocator(DeviceType::CPU);
    return on_device(Storage(Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, true), current, false);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} device_memory;

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned_ranges;  // first byte -> bytes

void pin(uintptr_t start, size_t bytes) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  pinned_ranges[start] = bytes;
}

bool is_pinned(uintptr_t address) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto after = pinned_ranges.upper_bound(address);
  return after != pinned_ranges.begin() && address - std::prev(after)->first < std::prev(after)->second;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, Device(DeviceType::CPU)};
    TORCH_CHECK(!std::getenv("VIRTUAL_GPU_PIN_ERROR"), "CUDA error: out of memory (cudaHostAlloc)");
    void* data = std::aligned_alloc(4096, (bytes + 4095) & ~size_t(4095));
    pin(reinterpret_cast<uintptr_t>(data), bytes);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_ranges.erase(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_memory;

// ---- tensors

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return Tensor(at::detail::empty_generic(size, &device_memory, key, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_memory, key, c10::dtype_or_default(dtype)));
}

// The same memory as a tensor on the CPU.
Tensor host(const Tensor& tensor) {
  auto keep = tensor.storage();
  auto options = c10::TensorOptions().dtype(tensor.dtype()).device(DeviceType::CPU);
  void* data = tensor.numel() ? tensor.unsafeGetTensorImpl()->mutable_data() : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [keep](void*) {}, options);
}

// The same memory as a tensor on a virtual GPU.
Tensor device(const Tensor& host, int64_t index, bool received) {
  auto bytes = host.storage().nbytes();
  auto data = on_device(host.storage(), static_cast<DeviceIndex>(index), received);
  Storage storage(Storage::use_byte_size_t(), bytes, std::move(data), &device_memory, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(host.storage_offset());
  impl->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
}

// Move the memory of a tensor on a virtual GPU, and of all its views, to that of a host storage with the same bytes.
void move_memory(const Tensor& tensor, const Tensor& host) {
  tensor.storage().set_data_ptr(on_device(host.storage(), tensor.device().index(), false));
}

bool is_received(const Tensor& tensor) { return tensor.storage().data_ptr().get_deleter() == &let_go<true>; }

// ---- generators

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index()); }
  mutable at::Generator host;  // which draws the numbers
};

// ---- what torch asks about the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return Device(CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
} guard;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return count(); }
  DeviceIndex deviceCount() const override { return count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, current); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(reinterpret_cast<uintptr_t>(data)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
};
}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

TORCH_LIBRARY(virtual_gpu, library) {
  library.def("host", host);
  library.def("device", device);
  library.def("move_memory", move_memory);
  library.def("is_received", is_received);
  library.def("host_generator", [](at::Generator generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
  });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {  // no launches
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
}

extern "C" {
void virtual_gpu_start() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  c10::SetAllocator(CUDA, &device_memory);
}
int virtual_gpu_current() { return current; }
void virtual_gpu_set_current(int index) { current = static_cast<DeviceIndex>(index); }
void virtual_gpu_pin(uintptr_t start, size_t bytes) { pin(start, bytes); }
int virtual_gpu_is_pinned(uintptr_t address) { return is_pinned(address); }
}
