#include "xla/gpu_forward.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/call_record.h"
#include "link/arena.h"
#include "link/exchange.h"
#include "sm90/addresses.h"
#include "sm90/finish.h"
#include "sm90/tensor_map.h"
#include "sm90/weighted_sum.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"
#include "xla/workspace.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;
using namespace mok::sm90;

using Communicators = ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>;
struct Collectives : ffi::internal::CollectivesExtensionBase<Communicators> {
  // Later minor versions only add to it.
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};
using Bf16Buffer = ffi::Buffer<ffi::BF16>;

ffi::Error failure(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInternal, "jax_mok: " + what);
}

// Everything static: stages before Execute see no operands.
struct ForwardAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int64_t hidden;
  int64_t inner;
  int32_t tile_rows;
  int64_t chunk_rows;
  int64_t ring_rows;
  float clamp;
  double timeout_s;
  ffi::Span<const int64_t> groups;  // of ranks: positions in the mesh, `ranks` each

  std::vector<std::vector<int64_t>> rank_groups() const {
    std::vector<std::vector<int64_t>> all;
    for (auto begin = groups.begin(); begin != groups.end(); begin += ranks) {
      all.emplace_back(begin, begin + ranks);
    }
    return all;
  }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
};

ForwardShape forward_shape(const ForwardAttributes& attributes) {
  return make_forward_shape({attributes.ranks, attributes.tokens, attributes.top_k,
                             attributes.experts, attributes.tile_rows, attributes.chunk_rows},
                            attributes.ring_rows, attributes.hidden, attributes.inner);
}

ArenaLayout arena_layout(const ForwardShape& shape) {
  return {shape.plan.ranks, shape.plan.choices(), shape.plan.tokens, shape.hidden};
}

// What a device needs to know before the first launch. Modules are loaded here: loading one while
// a peer waits has dead-locked others.
struct Device {
  int clusters = 0;
  CallRecord* record = nullptr;  // host-mapped
  CallRecord told{};             // what the host has taken of it
};

std::mutex devices_mutex;
std::map<int32_t, Device>& devices() {
  static auto* const all = new std::map<int32_t, Device>;
  return *all;
}

// Returns what went wrong, or nothing.
std::string prepare_device(int32_t ordinal) {
  const std::lock_guard lock(devices_mutex);
  if (devices().contains(ordinal)) {
    return "";
  }
  Device device;
  cudaError_t error = cudaSetDevice(ordinal);
  int major = 0, minor = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  if (error == cudaSuccess && (major != 9 || minor != 0)) {
    return "GPU " + std::to_string(ordinal) + " has compute capability " + std::to_string(major) +
           "." + std::to_string(minor) + "; the kernels need 9.0 (H100, H200)";
  }
  if (error == cudaSuccess) error = prepare_plan();
  if (error == cudaSuccess) error = prepare_forward(&device.clusters);
  for (const auto load :
       {load_addresses, load_exchange, load_finish, load_weighted_sum, load_work_list}) {
    if (error == cudaSuccess) error = load();
  }
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&device.record), sizeof(CallRecord),
                          cudaHostAllocMapped);
  }
  if (error == cudaSuccess) {
    *device.record = {};
    devices()[ordinal] = device;
    return "";
  }
  return std::string("preparing a GPU: ") + cudaGetErrorString(error);
}

Device device_of(int32_t ordinal) {
  const std::lock_guard lock(devices_mutex);
  return devices()[ordinal];
}

}  // namespace

std::vector<Fault> take_gpu_faults() {
  const std::lock_guard lock(devices_mutex);
  std::vector<Fault> faults;
  for (auto& [ordinal, device] : devices()) {
    CallRecord now;
    std::memcpy(&now, device.record, sizeof(now));
    if (now.link_timeouts != device.told.link_timeouts) {
      faults.push_back({FaultKind::kTimeout, Operation::kMeeting, /*group=*/0, now.rank, now.peer,
                        now.expected, now.seen});
    }
    if (now.kernel_timeouts != device.told.kernel_timeouts) {
      faults.push_back({FaultKind::kKernelTimeout, Operation::kDispatch, /*group=*/0, ordinal,
                        /*peer=*/-1, 0, now.kernel_timeouts - device.told.kernel_timeouts});
    }
    if (now.out_of_range != device.told.out_of_range) {
      faults.push_back({FaultKind::kExpertOutOfRange, Operation::kPlan, /*group=*/0, /*rank=*/-1,
                        /*peer=*/-1, now.experts, now.out_of_range - device.told.out_of_range});
    }
    device.told = now;
  }
  return faults;
}

namespace {

// Collects the first error of a sequence of launches.
class Launches {
 public:
  void operator()(const char* what, cudaError_t error) {
    if (error != cudaSuccess && first_.empty()) {
      first_ = std::string(what) + ": " + cudaGetErrorString(error);
    }
  }
  ffi::Error result() const { return first_.empty() ? ffi::Error::Success() : failure(first_); }

 private:
  std::string first_;
};

bool encode_maps(const ForwardShape& shape, const void* gate, const void* up, const void* down,
                 const void* ring, ForwardParams* params) {
  const int64_t experts = shape.plan.local_experts();
  return encode_matrix(&params->gate, gate, experts * shape.hidden, shape.inner, kBlockDepth) &&
         encode_matrix(&params->up, up, experts * shape.hidden, shape.inner, kBlockDepth) &&
         encode_matrix(&params->down, down, experts * shape.inner, shape.hidden, kBlockDepth) &&
         encode_matrix(&params->hidden_tiles, ring, shape.ring_rows, shape.inner, kTileRows) &&
         encode_matrix(&params->hidden_warps, ring, shape.ring_rows, shape.inner, kWarpRows);
}

ffi::Error run(cudaStream_t stream, int32_t ordinal, const Arena* arena, Bf16Buffer x,
               ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, Bf16Buffer w_gate,
               Bf16Buffer w_up, Bf16Buffer w_down, ffi::ResultBuffer<ffi::BF16> y,
               ffi::ResultBuffer<ffi::U8> workspace, const ForwardAttributes& attributes) {
  const ForwardShape shape = forward_shape(attributes);
  const Workspace space = lay_out(shape, reinterpret_cast<char*>(workspace->typed_data()));
  if (static_cast<int64_t>(workspace->size_bytes()) < space.bytes) {
    return failure("the workspace is too small");
  }
  const ArenaLayout layout = arena_layout(shape);
  const Device device = device_of(ordinal);
  const auto* const own_x = reinterpret_cast<const uint16_t*>(x.typed_data());
  auto* const out = reinterpret_cast<uint16_t*>(y->typed_data());
  const int32_t rank = arena == nullptr ? 0 : arena->rank;
  const uint64_t timeout_ns = attributes.timeout_ns();

  ForwardParams params{};
  if (!encode_maps(shape, w_gate.typed_data(), w_up.typed_data(), w_down.typed_data(),
                   space.hidden_ring, &params)) {
    return failure("the driver refuses the tensor maps of these shapes");
  }
  params.x = space.x;
  params.slots = space.slots;
  params.row_source = space.tables.row_source;
  params.items = space.list.items;
  params.item_count = space.list.item_count;
  params.tile_count = space.list.tile_count;
  params.hidden_ready = space.list.counters;
  params.down_done = space.list.counters + max_work_tiles(shape.plan);
  params.fault = space.kernel_failed;
  params.hidden = static_cast<int32_t>(shape.hidden);
  params.inner = static_cast<int32_t>(shape.inner);
  params.top_k = shape.plan.top_k;
  params.choices = static_cast<int32_t>(shape.plan.choices());
  params.ring_tiles = shape.work.ring_tiles;
  params.gate_up_columns = shape.work.gate_up_columns;
  params.down_columns = shape.work.down_columns;
  params.clamp = attributes.clamp;
  params.timeout_ns = timeout_ns;

  Launches launch;
  launch("fault words", cudaMemsetAsync(space.link_failed, 0, sizeof(int32_t), stream));
  launch("fault words", cudaMemsetAsync(space.kernel_failed, 0, sizeof(int32_t), stream));
  launch("addresses", fill_addresses({.x = space.x,
                                      .slots = space.slots,
                                      .ranks = shape.plan.ranks,
                                      .rank = rank,
                                      .own_x = own_x,
                                      .received = space.received,
                                      .tokens_elements = shape.plan.tokens * shape.hidden,
                                      .own_slots = space.own_slots,
                                      .bases = arena == nullptr ? nullptr : arena->bases,
                                      .slots_offset = layout.slots()},
                                     stream));
  const int32_t* routes = ids.typed_data();
  const uint16_t* slots = space.own_slots;
  if (arena != nullptr) {
    launch("publish", publish(*arena, layout, ids.typed_data(), own_x, stream));
    launch("entry barrier", barrier(*arena, layout, timeout_ns, space.kernel_failed,
                                    space.link_failed, device.record, stream));
    launch("pull", pull_tokens(*arena, layout, space.received, space.routes, stream));
    routes = space.routes;
    slots = reinterpret_cast<const uint16_t*>(arena->own + layout.slots());
  }
  launch("plan", build_plan(shape.plan, rank, routes, space.tables, space.plan_scratch, stream));
  launch("work list",
         list_work(shape.plan, shape.work, space.tables.expert_tile, space.list, stream));
  launch("forward", launch_forward(params, device.clusters, stream));
  if (arena != nullptr) {
    launch("exit barrier", barrier(*arena, layout, timeout_ns, space.kernel_failed,
                                   space.link_failed, device.record, stream));
  }
  launch("weighted sum",
         weighted_sum({slots, space.tables.slot_rank, weights.typed_data(), out, shape.plan.tokens,
                       shape.plan.top_k, static_cast<int32_t>(shape.hidden)},
                      stream));
  launch("finish", finish({.link_failed = space.link_failed,
                           .kernel_failed = space.kernel_failed,
                           .counts = space.tables.counts,
                           .experts = shape.plan.experts,
                           .out = out,
                           .elements = shape.plan.tokens * shape.hidden,
                           .record = device.record},
                          stream));
  return launch.result();
}

ffi::Error initialize_alone(int32_t ordinal) {
  const std::string error = prepare_device(ordinal);
  return error.empty() ? ffi::Error::Success() : failure(error);
}

ffi::Error execute_alone(cudaStream_t stream, int32_t ordinal, Bf16Buffer x,
                         ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         Bf16Buffer w_gate, Bf16Buffer w_up, Bf16Buffer w_down,
                         ffi::ResultBuffer<ffi::BF16> y, ffi::ResultBuffer<ffi::U8> workspace,
                         ForwardAttributes attributes) {
  return run(stream, ordinal, nullptr, x, ids, weights, w_gate, w_up, w_down, y, workspace,
             attributes);
}

ffi::ErrorOr<void*> communicator(Communicators communicators, const ForwardAttributes& attributes) {
  const auto handle =
      communicators.GetCommunicator(ffi::GroupMode::kFlattenedId, attributes.rank_groups(), 0);
  if (handle.has_error()) {
    return ffi::Unexpected(handle.error());
  }
  return static_cast<void*>(*handle);
}

ffi::Error prepare_peers(Communicators communicators, ForwardAttributes attributes) {
  return communicators.RequestCommunicator(ffi::GroupMode::kFlattenedId, attributes.rank_groups(),
                                           0);
}

ffi::Error initialize_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                            ForwardAttributes attributes) {
  if (const std::string error = prepare_device(ordinal); !error.empty()) {
    return failure(error);
  }
  const auto comm = communicator(communicators, attributes);
  if (comm.has_error()) {
    return comm.error();
  }
  const ArenaLayout layout = arena_layout(forward_shape(attributes));
  std::string error;
  if (find_or_make_arena(*comm, ordinal, layout, stream, &error) == nullptr) {
    return failure(error);
  }
  return ffi::Error::Success();
}

ffi::Error execute_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                         Bf16Buffer x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         Bf16Buffer w_gate, Bf16Buffer w_up, Bf16Buffer w_down,
                         ffi::ResultBuffer<ffi::BF16> y, ffi::ResultBuffer<ffi::U8> workspace,
                         ForwardAttributes attributes) {
  const auto comm = communicator(communicators, attributes);
  if (comm.has_error()) {
    return comm.error();
  }
  const Arena* const arena = find_arena(*comm, arena_layout(forward_shape(attributes)));
  if (arena == nullptr) {
    return failure("the arena was not initialised");
  }
  return run(stream, ordinal, arena, x, ids, weights, w_gate, w_up, w_down, y, workspace,
             attributes);
}

}  // namespace
}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::ForwardAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int64_t>("hidden"),
    xla::ffi::StructMember<int64_t>("inner"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<int64_t>("ring_rows"),
    xla::ffi::StructMember<float>("clamp"), xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));

namespace mok {
namespace {

template <typename Binding>
auto bind_forward(Binding binding) {
  return std::move(binding)
      .template Arg<Bf16Buffer>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<Bf16Buffer>()
      .template Arg<Bf16Buffer>()
      .template Arg<Bf16Buffer>()
      .template Ret<Bf16Buffer>()
      .template Ret<ffi::Buffer<ffi::U8>>()
      .template Attrs<ForwardAttributes>();
}

XLA_FFI_DEFINE_HANDLER(
    initialize_alone_handler, initialize_alone,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(execute_alone_handler, execute_alone,
                       bind_forward(ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                        .Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(prepare_peers_handler, prepare_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_peers_handler, initialize_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(execute_peers_handler, execute_peers,
                       bind_forward(ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                        .Ctx<ffi::DeviceOrdinal>()
                                        .Ctx<ffi::Extension<Collectives>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokForwardAloneInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_alone_handler(frame);
}
XLA_FFI_Error* MokForwardAloneExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_alone_handler(frame);
}
XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_peers_handler(frame);
}
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_peers_handler(frame);
}
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_peers_handler(frame);
}

}  // extern "C"
