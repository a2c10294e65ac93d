// A device with streams, made of CPU memory: PyTorch's PrivateUse1 backend. Every kernel runs at once on the CPU and is
// reported to the callbacks with its stream and the memory that it reads and writes; so is all that orders streams
// (events, waits) and every allocation. What time means, and what is a race, Python decides.
#define AT_PER_OPERATOR_HEADERS  // a third less to compile
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" {  // of Python.h, which need not be installed
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);
}

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Callbacks {
  void (*allocated)(void* at, int64_t bytes, int pinned);
  void (*freed)(void* at);
  void (*ran)(const char* name, int64_t stream, int count, void** at, int64_t* bytes, int* writes);
  void (*recorded)(int64_t event, int64_t stream);
  void (*waits)(int64_t stream, int64_t event);
  void (*host_waits)(int64_t event, int64_t stream);  // for the event if it is > 0, else for the stream; -1: a kernel does
  void (*used_by)(void* at, int64_t stream);  // record_stream
  double (*elapsed)(int64_t begin, int64_t end);
  void (*queried)(int64_t event, int64_t stream);  // whether an event, or a stream if that is 0, is done
  int64_t (*graph)(int64_t stream);  // the graph that captures what is queued on a stream now; 0: none does
};
Callbacks* callbacks = nullptr;  // taken away before the interpreter ends

// Calls a callback, if there are any. Memory is freed while exceptions unwind, so a pending one is put aside.
template <typename Result, typename... Args>
Result call(Result (*Callbacks::*which)(Args...), std::type_identity_t<Args>... args) {
  if (!callbacks) return Result();
  struct Pending {
    int locked = PyGILState_Ensure();
    void *type, *value, *traceback;
    Pending() { PyErr_Fetch(&type, &value, &traceback); }
    ~Pending() {
      PyErr_Restore(type, value, traceback);
      PyGILState_Release(locked);
    }
  } pending;
  return (callbacks->*which)(args...);
}

thread_local int64_t current_stream = 0;
std::atomic<int64_t> next_stream{1}, next_event{1};

// -- memory -----------------------------------------------------------------------------------------------------------

std::mutex pinned_lock;
std::map<const char*, size_t> pinned_memory;

// Blocks of one stream, as torch's caching allocator has them: the smallest that fits, split, and merged when it is free.
struct Pool {
  std::map<char*, std::pair<size_t, bool>> blocks;  // size, and whether it is in use
  std::unordered_map<char*, size_t> segments;       // what malloc gave

  char* take(size_t bytes) {
    constexpr size_t least = 512, small = 1 << 20, segment = 2 << 20;
    bytes = (bytes + least - 1) / least * least;
    auto best = blocks.end();
    for (auto block = blocks.begin(); block != blocks.end(); ++block) {
      auto [size, used] = block->second;
      if (!used && size >= bytes && (best == blocks.end() || size < best->second.first)) best = block;
    }
    if (best == blocks.end()) {
      size_t size = bytes <= small ? segment : (bytes + segment - 1) / segment * segment;
      auto* at = static_cast<char*>(std::malloc(size));
      TORCH_CHECK(at, "out of memory");
      segments[at] = size;
      best = blocks.emplace(at, std::pair(size, false)).first;
    }
    auto& [at, block] = *best;
    if (block.first > bytes) blocks.emplace(at + bytes, std::pair(block.first - bytes, false));
    block = {bytes, true};
    return at;
  }
  void merge_next(std::map<char*, std::pair<size_t, bool>>::iterator block) {
    auto next = std::next(block);
    if (next == blocks.end() || next->second.second || block->second.second || segments.count(next->first)) return;
    block->second.first += next->second.first;
    blocks.erase(next);
  }
  void give(char* at) {
    auto block = blocks.find(at);
    block->second.second = false;
    merge_next(block);
    if (block != blocks.begin()) merge_next(std::prev(block));
  }
  void trim() {
    for (auto segment = segments.begin(); segment != segments.end();) {
      auto block = blocks.find(segment->first);
      bool unused = !block->second.second && block->second.first == segment->second;
      if (unused) {
        std::free(segment->first);
        blocks.erase(block);
      }
      segment = unused ? segments.erase(segment) : std::next(segment);
    }
  }
};
std::mutex pools_lock;
std::map<std::pair<int64_t, int64_t>, Pool> pools;  // by graph, whose private pool it is, and stream
std::unordered_map<void*, Pool*> pool_of;

char* take_from_pool(size_t bytes) {
  std::pair key(call(&Callbacks::graph, current_stream), current_stream);
  std::lock_guard<std::mutex> guard(pools_lock);
  auto& pool = pools[key];
  auto* at = pool.take(bytes);
  pool_of[at] = &pool;
  return at;
}

void give_to_pool(void* at) {
  std::lock_guard<std::mutex> guard(pools_lock);
  pool_of.at(at)->give(static_cast<char*>(at));
  pool_of.erase(at);
}

struct Allocator final : c10::Allocator {
  explicit Allocator(bool pinned) : pinned(pinned) {}
  bool pinned;

  c10::DataPtr allocate(size_t bytes) override {
    auto device = pinned ? c10::Device(c10::kCPU) : c10::Device(kDevice, 0);
    if (bytes == 0) return {nullptr, nullptr, raw_deleter(), device};
    void* at = pinned ? std::malloc(bytes) : take_from_pool(bytes);
    TORCH_CHECK(at, "out of memory");
    std::memset(at, 0x7f, bytes);  // large numbers in every floating dtype: nobody takes them for data
    if (pinned) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_memory[static_cast<const char*>(at)] = bytes;
    }
    call(&Callbacks::allocated, at, bytes, pinned);
    return {at, at, raw_deleter(), device};
  }
  static void release(void* at) {
    if (!at) return;
    bool pinned;
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned = pinned_memory.erase(static_cast<const char*>(at));
    }
    call(&Callbacks::freed, at);
    pinned ? std::free(at) : give_to_pool(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator device_memory{false}, host_memory{true};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto at = static_cast<const char*>(data);
    auto after = pinned_memory.upper_bound(at);
    return after != pinned_memory.begin() && at <= std::prev(after)->first + std::prev(after)->second;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = device_memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// -- streams ----------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::Stream made(int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id); }
  static int64_t id_of(void* event) { return reinterpret_cast<int64_t>(event); }

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return made(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return made(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return made(next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return made(next_stream++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = made(current_stream);
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    call(&Callbacks::recorded, id_of(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) call(&Callbacks::waits, stream.id(), id_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) call(&Callbacks::host_waits, id_of(event), 0);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    call(&Callbacks::host_waits, 0, stream.id());
  }
  bool queryEvent(void* event) const override {
    if (event) call(&Callbacks::queried, id_of(event), 0);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    call(&Callbacks::queried, 0, stream.id());
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get()) call(&Callbacks::used_by, data.get(), stream.id());
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return call(&Callbacks::elapsed, id_of(begin), id_of(end));
  }
};

// -- kernels ----------------------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

struct Accesses {
  std::vector<void*> at;
  std::vector<int64_t> bytes;
  std::vector<int> writes;

  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    at.push_back(tensor.mutable_data_ptr());
    bytes.push_back((last + 1) * static_cast<int64_t>(tensor.element_size()));
    writes.push_back(written);
  }
  void report(const std::string& name) {
    call(&Callbacks::ran, name.c_str(), current_stream, at.size(), at.data(), bytes.data(), writes.data());
  }
};

at::Tensor on_cpu(const at::Tensor& tensor, const std::string& name) {
  if (!is_ours(tensor)) return tensor;
  auto* at = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  TORCH_CHECK(at || !tensor.numel(), name, ": a tensor of shape ", tensor.sizes(), " lies in storage that was freed");
  return at::from_blob(at, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor from_cpu(const at::Tensor& tensor, Accesses& accesses) {
  if (!tensor.defined()) return tensor;
  at::Tensor moved = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      tensor.scalar_type());
  if (tensor.numel()) on_cpu(moved, "a result").copy_(tensor);
  accesses.add(moved, true);
  return moved;
}

c10::IValue moved_argument(const c10::IValue& value, bool written, const std::string& name, Accesses& accesses) {
  if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(c10::kCPU);
  auto moved = [&](const at::Tensor& tensor) {
    if (is_ours(tensor)) accesses.add(tensor, written);
    return on_cpu(tensor, name);
  };
  if (value.isTensor()) return moved(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(moved(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(moved(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// What a graph runs again: the kernels that were queued while it captured, over the memory that they had then.
std::map<int64_t, std::vector<std::function<void()>>> graphs;

// Has the graph that captures now, if one does, run an operator again, on copies of its arguments.
void capture_operator(
    int64_t graph, const c10::OperatorHandle& op, torch::jit::Stack given, std::vector<std::vector<at::Tensor>> results) {
  graphs[graph].push_back([op, given = std::move(given), results = std::move(results)] {
    auto stack = given;
    op.callBoxed(&stack);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].empty()) continue;
      auto again = stack[i].isTensor() ? std::vector<at::Tensor>{stack[i].toTensor()} : stack[i].toTensorVector();
      for (size_t j = 0; j < again.size(); ++j) if (results[i][j].numel()) results[i][j].copy_(again[j]);
    }
  });
}

// Runs any operator on CPU tensors over the same memory. What it returns anew is copied to the device.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const auto& schema = op.schema();
  auto name = toString(op.operator_name());
  Accesses accesses;
  auto given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, given.size());
  torch::jit::Stack moved;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    moved.push_back(moved_argument(given[i], alias && alias->isWrite(), name, accesses));
  }
  auto graph = call(&Callbacks::graph, current_stream);
  auto captured = graph ? moved : torch::jit::Stack();
  std::vector<std::vector<at::Tensor>> results(schema.returns().size());
  op.callBoxed(&moved);
  bool to_host = false;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      size_t source = 0;
      while (!schema.arguments()[source].alias_info() || !(*schema.arguments()[source].alias_info() == *alias)) ++source;
      stack->push_back(given[source]);
    } else if (moved[i].isTensor()) {
      stack->push_back(from_cpu(moved[i].toTensor(), accesses));
      if (stack->back().toTensor().defined()) results[i].push_back(on_cpu(stack->back().toTensor(), name));
    } else if (moved[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : moved[i].toTensorVector()) {
        list.push_back(from_cpu(tensor, accesses));
        results[i].push_back(on_cpu(list.get(list.size() - 1), name));
      }
      stack->push_back(list);
    } else {
      stack->push_back(moved[i]);
      to_host = true;
    }
  }
  if (graph) capture_operator(graph, op, std::move(captured), std::move(results));
  accesses.report(name);
  if (to_host) call(&Callbacks::host_waits, -1, current_stream);  // a number that the host computes with
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto source = on_cpu(from, "copy_"), target = on_cpu(to, "copy_");
  target.copy_(source);
  if (auto graph = call(&Callbacks::graph, current_stream)) {
    graphs[graph].push_back([source, target] { target.copy_(source); });
  }
  Accesses accesses;
  accesses.add(from, false);
  accesses.add(to, true);
  bool inside = is_ours(from) && is_ours(to);
  accesses.report(inside ? "copy" : is_ours(to) ? "host_to_device" : "device_to_host");
  bool pinned = inside || Hooks().isPinnedPtr((is_ours(to) ? from : to).storage().data());
  if (!inside && !(non_blocking && pinned)) call(&Callbacks::host_waits, -1, current_stream);
  return to;
}

void used_by(at::Tensor& tensor, c10::Stream stream) {
  if (tensor.storage().data()) call(&Callbacks::used_by, tensor.storage().mutable_data(), stream.id());
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("resize_", at::native::resize_);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", used_by);
  // One kernel each on a GPU, though they are composites elsewhere.
  m.impl("split_with_sizes_copy.out", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("_chunk_cat", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("_chunk_cat.out", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

extern "C" {
void simulation_start(Callbacks* given) {
  static bool registered = [] {
    c10::SetAllocator(kDevice, &device_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    return true;
  }();
  (void)registered;
  callbacks = given;
}
void simulation_replay(int64_t graph) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  for (const auto& kernel : graphs[graph]) kernel();
}
void simulation_end() {  // of one simulation: nothing runs again, and what nobody uses goes back to the system
  graphs.clear();
  std::lock_guard<std::mutex> guard(pools_lock);
  for (auto& [key, pool] : pools) pool.trim();
}
int64_t simulation_stream() { return current_stream; }
void simulation_set_stream(int64_t stream) { current_stream = stream; }
}
