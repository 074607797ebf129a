#include "cli/plan_meshes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <mutex>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"

namespace ferry::cli {
namespace {

// Sizes of 0 are left as they are.
struct Mesh {
  int tp = 0;
  int pp = 0;
  int ep = 0;
  int rollout_tp = 0;
  int rollout_ep = 0;

  bool operator==(const Mesh&) const = default;
};

std::vector<std::string> settings_of(const MeshSpace& space, const Mesh& mesh) {
  std::vector<std::string> settings;
  const auto add = [&](const std::string& section, std::string_view name, int value) {
    if (value > 0) settings.push_back(fmt::format("{}.{}={}", section, name, value));
  };
  add(space.engine, "tensor_model_parallel_size", mesh.tp);
  add(space.engine, "pipeline_model_parallel_size", mesh.pp);
  add(space.engine, "expert_model_parallel_size", mesh.ep);
  // Experts over ranks are whole.
  const auto add_etp = [&](const std::string& section, int ep) {
    constexpr std::string_view kEtp = "expert_tensor_parallel_size";
    if (ep > 1 && !space.fixed.contains(fmt::format("{}.{}", section, kEtp))) add(section, kEtp, 1);
  };
  add_etp(space.engine, mesh.ep);
  add(space.rollout, "tensor_model_parallel_size", mesh.rollout_tp);
  add(space.rollout, "expert_parallel_size", mesh.rollout_ep);
  add_etp(space.rollout, mesh.rollout_ep);
  return settings;
}

// Powers of two up to `most`, or nothing but 0 for a key that keeps its value.
std::vector<int> sizes(const MeshSpace& space, const std::string& key, std::int64_t most) {
  if (space.fixed.contains(key)) return {0};
  std::vector<int> powers;
  for (int size = 1; size <= std::max<std::int64_t>(1, most); size *= 2) powers.push_back(size);
  return powers;
}

std::vector<int> expert_sizes(const MeshSpace& space, const std::string& key) {
  if (space.experts == 0) return {0};
  return sizes(space, key, std::min<std::int64_t>(space.ranks, space.experts));
}

// The learner's, and the same for the rollout as far as it has them.
std::vector<Mesh> learner_meshes(const MeshSpace& space) {
  const auto most_tp = std::min(space.ranks, space.ranks_per_host);
  const auto own = [&](const std::string& key, int size) {
    return space.rollout.empty() || space.fixed.contains(key) ? 0 : size;
  };
  std::vector<Mesh> meshes;
  for (const int tp : sizes(space, space.engine + ".tensor_model_parallel_size", most_tp))
    for (const int pp : sizes(space, space.engine + ".pipeline_model_parallel_size",
                              std::min<std::int64_t>(space.ranks, space.layers)))
      for (const int ep : expert_sizes(space, space.engine + ".expert_model_parallel_size"))
        meshes.push_back({.tp = tp,
                          .pp = pp,
                          .ep = ep,
                          .rollout_tp = own(space.rollout + ".tensor_model_parallel_size", tp),
                          .rollout_ep = space.experts > 0
                                            ? own(space.rollout + ".expert_parallel_size", ep)
                                            : 0});
  return meshes;
}

std::vector<Mesh> rollout_meshes(const MeshSpace& space, const Mesh& learner) {
  const auto most_tp = std::min(space.ranks, space.ranks_per_host);
  std::vector<Mesh> meshes;
  for (const int tp : sizes(space, space.rollout + ".tensor_model_parallel_size", most_tp)) {
    for (const int ep : expert_sizes(space, space.rollout + ".expert_parallel_size")) {
      auto mesh = learner;
      mesh.rollout_tp = tp;
      mesh.rollout_ep = ep;
      if (mesh != learner) meshes.push_back(mesh);
    }
  }
  return meshes;
}

class Search {
 public:
  Search(const MeshSpace& space,
         const std::function<trainer::PlannedRun(const std::vector<std::string>&)>& plan)
      : space_(space), plan_(plan) {}

  void add(const std::vector<Mesh>& meshes) {
    distckpt::side_by_side(std::ssize(meshes), distckpt::available_cores(),
                           [&](std::int64_t i) { add(meshes[static_cast<std::size_t>(i)]); });
    if (failure_) std::rethrow_exception(failure_);
    if (found_.empty() && refusal_) std::rethrow_exception(refusal_);
    // The smallest sizes are first of those that take the same time, those that do not fit last.
    std::ranges::sort(found_, {}, [](const auto& one) {
      const auto& mesh = one.first;
      const auto& plan = one.second.run.plan;
      return std::tuple(!plan.fits(), plan.step_seconds(), mesh.pp, mesh.tp, mesh.ep,
                        mesh.rollout_tp, mesh.rollout_ep);
    });
  }

  // The `count` meshes that fit and take the fewest seconds, and as many that do not fit: they may
  // with another rollout.
  std::vector<Mesh> learners(std::size_t count) const {
    std::vector<Mesh> meshes;
    std::array<std::size_t, 2> taken{};
    for (const auto& [mesh, planned] : found_)
      if (taken[planned.run.plan.fits() ? 0 : 1]++ < count) meshes.push_back(mesh);
    return meshes;
  }

  PlannedMeshes result(std::size_t count) && {
    PlannedMeshes result{.planned = found_.size()};
    for (auto& [mesh, planned] : found_) {
      if (!planned.run.plan.fits()) break;
      if (result.fit++ < count) result.best.push_back(std::move(planned));
    }
    return result;
  }

 private:
  void add(const Mesh& mesh) {
    try {
      auto settings = settings_of(space_, mesh);
      auto run = plan_(settings);
      const std::lock_guard lock(mutex_);
      found_.emplace_back(mesh,
                          PlannedMesh{.settings = std::move(settings), .run = std::move(run)});
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      auto& kept = error.kind() == ErrorKind::kUsage ? refusal_ : failure_;
      if (!kept) kept = std::current_exception();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  const MeshSpace& space_;
  const std::function<trainer::PlannedRun(const std::vector<std::string>&)>& plan_;
  std::mutex mutex_;
  std::vector<std::pair<Mesh, PlannedMesh>> found_;
  std::exception_ptr failure_;
  std::exception_ptr refusal_;  // of a mesh that is not possible
};

}  // namespace

PlannedMeshes plan_meshes(
    const MeshSpace& space,
    const std::function<trainer::PlannedRun(const std::vector<std::string>& settings)>& plan,
    std::size_t count) {
  constexpr std::size_t kLearners = 8;  // whose rollouts are tried
  Search search(space, plan);
  search.add(learner_meshes(space));
  if (!space.rollout.empty()) {
    for (const auto& learner : search.learners(kLearners))
      search.add(rollout_meshes(space, learner));
  }
  return std::move(search).result(count);
}

}  // namespace ferry::cli
