#include "call/plan.h"

#include "call/device.h"
#include "call/launches.h"
#include "call/parts.h"
#include "call/peers.h"
#include "core/signature.h"
#include "link/exchange.h"
#include "sm90/finish.h"
#include "sm90/plan.h"

namespace mok {
namespace {

struct Workspace {
  int32_t* scratch;  // [plan_scratch_words]
  int32_t* routes;   // [ranks, tokens, top_k]; only with peers, and not if they come gathered

  // Set to zero before a call.
  int32_t* link_failed;
  int32_t* kernel_failed;  // set if a launch has failed: no kernel of this call waits for another
  uint32_t* blocks_done;   // of those that publish

  int64_t bytes;
};

Workspace lay_out(const PlanShape& shape, char* base) {
  Parts parts(base);
  Workspace space{};
  space.scratch = parts.take<int32_t>(sm90::plan_scratch_words(shape));
  space.routes = shape.ranks == 1 ? nullptr : parts.take<int32_t>(shape.ranks * shape.choices());
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.blocks_done = parts.take<uint32_t>(1);
  space.bytes = parts.used();
  return space;
}

void clear_words(Launches& launch, const Workspace& space, cudaStream_t stream) {
  launch("zero", cudaMemsetAsync(space.link_failed, 0, sizeof(int32_t), stream));
  launch("zero", cudaMemsetAsync(space.kernel_failed, 0, sizeof(int32_t), stream));
  launch("zero", cudaMemsetAsync(space.blocks_done, 0, sizeof(uint32_t), stream));
}

// The tables of `rank`, or of the one that `source.rank` points to.
void fill_tables(Launches& launch, const PlanShape& shape, int32_t rank,
                 const sm90::PlanSource& source, const PlanTables& tables, const Workspace& space,
                 CallRecord* record, cudaStream_t stream) {
  launch("plan", sm90::build_plan(shape, rank, source, tables, stream));
  launch("finish", sm90::finish({.link_failed = space.link_failed,
                                 .kernel_failed = space.kernel_failed,
                                 .counts = tables.counts,
                                 .experts = shape.experts,
                                 .results = {},
                                 .kept_plan = nullptr,
                                 .record = record},
                                stream));
}

}  // namespace

bool plan_call_fits(const PlanShape& shape) { return sm90::plan_fits(shape); }

int64_t plan_workspace_bytes(const PlanShape& shape) { return lay_out(shape, nullptr).bytes; }

ArenaLayout plan_arena_layout(const PlanShape& shape) {
  return {.ranks = shape.ranks, .choices = shape.choices(), .tokens = shape.tokens};
}

std::string launch_plan_call(const PlanCall& call, int32_t ordinal, cudaStream_t stream) {
  const PlanShape& shape = call.shape;
  const ArenaLayout layout = plan_arena_layout(shape);
  const Arena* arena = nullptr;
  if (std::string problem = find_peers(call.communicator, layout, &arena); !problem.empty()) {
    return problem;
  }
  const Workspace space = lay_out(shape, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  CallRecord* const record = device_of(ordinal).record;
  const MeetingTerms terms{
      signature_of(CallKind::kPlan, shape, /*directions=*/{}, 0, 0, /*is_mx=*/false),
      call.timeout_ns, space.kernel_failed, space.link_failed, record};

  count_launched_call();
  Launches launch;
  clear_words(launch, space, stream);
  const int32_t* routes = call.ids;
  int32_t rank = 0;
  if (arena != nullptr) {
    launch("publish",
           publish(*arena, layout, shape, routes, /*x=*/{}, terms, space.blocks_done, stream));
    launch("routes", copy_routes(*arena, layout, space.link_failed, space.routes, stream));
    // From here on a peer's next call may overwrite the routes in this rank's arena. Only now is it
    // known whether one has done so before, having waited in vain for this rank.
    if (launch.failed()) {  // the peers have not got this rank's routes
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    launch("exit barrier", exit_barrier(*arena, layout, terms, stream));
    launch("mask",
           mask_routes_if(space.link_failed, space.routes, shape.ranks * shape.choices(), stream));
    routes = space.routes;
    rank = arena->rank;
  }
  fill_tables(launch, shape, rank, {.routes = routes, .scratch = space.scratch, .to_pull = nullptr},
              call.tables, space, record, stream);
  return launch.result();
}

std::string launch_gathered_plan_call(const GatheredPlanCall& call, int32_t ordinal,
                                      cudaStream_t stream) {
  const Workspace space = lay_out(call.shape, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  Launches launch;
  clear_words(launch, space, stream);
  fill_tables(launch, call.shape, /*rank=*/-1,
              {.routes = call.ids, .scratch = space.scratch, .to_pull = nullptr, .rank = call.rank},
              call.tables, space, device_of(ordinal).record, stream);
  return launch.result();
}

}  // namespace mok
