#include "trainer/plan/phase_seconds.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "distckpt/base/integers.h"
#include "models/spec/costs.h"
#include "models/spec/products.h"
#include "models/spec/roofline.h"

namespace ferry::trainer {
namespace {

using distckpt::ceil_div;
using Granularity = models::Recompute::Granularity;
using Work = Phase::Work;

constexpr int kDevicesOfHost = 8;
constexpr double kNetworkRate = 50e9;   // bytes a second and device between hosts: 400 Gbit/s
constexpr double kReshardShare = 0.5;   // of the link: docs/benchmarks.md#resharding
constexpr double kBytesOfHidden = 2.0;  // of an element between ranks

double real(std::int64_t size) {
  return static_cast<double>(size);
}

// The shares of dense models, which vision towers are taken to have.
constexpr double kDenseLearning = 0.58;
constexpr double kDenseForward = 0.65;

// Shares of a device's peak, as measured: docs/training/planning.md says on what.
struct Efficiency {
  double learning = 0;    // forward and backward, of floating-point operations
  double forward = 0;     // forward alone
  double generation = 0;  // of models/spec/roofline.h
};

Efficiency efficiency_of(const models::TransformerConfig& model,
                         const models::MeshShape& mesh,
                         models::Alignment alignment) {
  const bool bitwise = alignment == models::Alignment::kBitwise;
  if (model.num_moe_experts == 0) {
    // kBitwise gathers what ranks share instead of adding it up.
    const double two = bitwise ? 0.36 : 0.52, more = bitwise ? 0.29 : 0.35;
    const double generation = mesh.tp() == 1 ? 0.62 : mesh.tp() == 2 ? two : more;
    return {.learning = kDenseLearning, .forward = kDenseForward, .generation = generation};
  }
  if (mesh.ep() > 1) {
    // kBitwise sends the result of each choice.
    const double alone = bitwise ? 0.34 : 0.56;
    return {.learning = bitwise ? 0.34 : 0.35,
            .forward = bitwise ? 0.32 : 0.37,
            .generation = mesh.tp() > 1 ? 0.36 : alone};
  }
  const double two = bitwise ? 0.44 : 0.46;
  const double generation = mesh.tp() == 1 ? 0.67 : mesh.tp() == 2 ? two : 0.36;
  return {.learning = 0.33, .forward = 0.33, .generation = generation};
}

// The share of its link that each of so many devices of a host gets in each direction, when state
// goes both ways at once: the memory of the host bounds four.
double streamed_share(int devices) {
  return devices == 1 ? 0.87 : devices == 2 ? 0.65 : 0.37;
}

// The share of a message that a ring or an exchange sends: all but a rank's own part.
double sent(int ranks) {
  return 1.0 - 1.0 / ranks;
}

class StepClock {
 public:
  explicit StepClock(const RunSetup& setup) : setup_(setup) {}

  double passes(const RoleSetup& role, bool learns) const {
    const auto mesh = role.mesh();
    const auto sequences = setup_.sequences * (learns ? role.epochs : 1);
    const auto tokens = real(sequences) * real(setup_.longest_sequence);
    const auto shares = efficiency_of(role.model, mesh, role.engine.alignment);
    const auto operations = operations_of(role, sequences);
    const auto devices = real(mesh.world_size()) * setup_.device.flops;
    const double forward = operations / 3;
    const double computed =
        learns ? (operations + recomputed_operations(role, sequences)) / (devices * shares.learning)
               : forward / (devices * shares.forward);
    return seen(role, sequences, mesh.dp(), learns) +
           (computed + exchanged(role, mesh, tokens, rounds_of(role, learns))) *
               bubble(role, mesh, learns) +
           (learns ? accumulated(role, mesh) : 0) +
           (learns && setup_.rollout ? real(role.updates) * updated(role, mesh) : 0);
  }

  // A step of the optimizer, its gradients and parameters among the data parallel ranks.
  double updated(const RoleSetup& role, const models::MeshShape& mesh) const {
    const auto memory = first_model(role).memory(true);
    const double messages = real(memory.gradients + memory.parameters) *
                            sent(mesh.dp() * mesh.cp()) / rate_among(mesh.world_size());
    const double share = streamed_share(std::min(mesh.world_size(), kDevicesOfHost));
    // State on the host goes up while it comes down, and is updated meanwhile.
    const double state = memory.on_host > 0
                             ? real(memory.on_host) / (share * setup_.device.host_rate)
                             : 2 * real(memory.optimizer) / setup_.device.memory_rate;
    return messages + state;
  }

  double generated() const {
    const auto& rollout = *setup_.rollout;
    const auto& model = setup_.roles.front().model;
    const auto mesh = rollout.mesh();
    const auto& engine = setup_.roles.front().engine;
    const auto shares = efficiency_of(model, mesh, engine.alignment);
    const models::LayoutOptions layout{.alignment = engine.alignment, .dtype = engine.dtype};
    const models::Roofline roofline(
        model, mesh, layout,
        {.bytes_per_second = setup_.device.memory_rate, .flops_per_second = setup_.device.flops});
    const auto sequences = ceil_div(setup_.sequences, std::int64_t{mesh.dp()});
    const auto together = std::max<std::int64_t>(
        1, std::min({sequences, std::int64_t{rollout.settings.max_num_seqs}, cached_sequences()}));
    const auto answer = setup_.longest_sequence - setup_.prompt_tokens;
    const auto steps = ceil_div(sequences, together) * answer;
    const double decoding =
        real(steps) *
        roofline.seconds({.rows = together,
                          .drawn = together,
                          .cached_keys = together * (setup_.prompt_tokens + answer / 2)});
    // Answers to one prompt share its keys.
    const auto prompts = sequences / std::max(rollout.settings.n, 1) * setup_.prompt_tokens;
    return (decoding + roofline.seconds({.rows = prompts})) / shares.generation +
           seen(setup_.roles.front(), setup_.sequences / std::max(rollout.settings.n, 1), mesh.dp(),
                false);
  }

  // Parameters that rest on the host come to the device and go back: the actor's around the
  // rollout, others' around each of their phases.
  double moved(const RoleSetup& role) const {
    if (!setup_.rollout || !role.engine.param_offload.value_or(false)) return 0;
    if (role.role == Role::kActor && setup_.rollout->shares_memory) return 0;
    return 2 * real(first_model(role).memory(false).parameters) / setup_.device.host_rate;
  }

  double resharded() const {
    if (setup_.rollout->shares_memory) return 0;
    for (const auto& group : rank_groups(setup_)) {
      if (group.rollout)
        return real(group.rollout->memory(false).parameters) /
               (kReshardShare * rate_among(setup_.world_size));
    }
    return 0;
  }

 private:
  // A vision tower sees an image of each of so many sequences, which data parallel ranks share;
  // others compute it whole, each for itself.
  double seen(const RoleSetup& role, std::int64_t sequences, int dp, bool learns) const {
    if (setup_.image_tokens == 0 || !role.model.computes_vision()) return 0;
    const std::vector<std::int64_t> images{setup_.image_tokens};
    const double forward = real(sequences) / dp * models::vision_flops(*role.model.vision, images) /
                           setup_.device.flops;
    const bool trained = learns && !role.engine.freeze_vision_tower;
    return trained ? 3 * forward / kDenseLearning : forward / kDenseForward;
  }

  // The share of the layers that is computed again as a whole.
  static double recomputed_layers(const RoleSetup& role) {
    const auto recompute = role.engine.recompute();
    if (recompute.granularity != Granularity::kFull) return 0;
    if (recompute.method == models::Recompute::Method::kUniform) return 1;
    const auto chunks = models::stage_chunks(role.model, role.engine.parallel, 0);
    const auto layers = chunks.front().layers.size();
    return std::min(1.0, real(recompute.num_layers) / static_cast<double>(layers));
  }

  double rate_among(int ranks) const {
    return ranks <= kDevicesOfHost ? setup_.device.link_rate : kNetworkRate;
  }

  ModelOnRank first_model(const RoleSetup& role) const {
    return {role.model, role.engine, role.mesh(), {}, role.memory.dtypes, setup_.device.on_host};
  }

  double operations_of(const RoleSetup& role, std::int64_t sequences) const {
    const std::array<std::int64_t, 1> length{setup_.longest_sequence};
    return real(sequences) * models::training_flops(role.model, length);
  }

  double recomputed_operations(const RoleSetup& role, std::int64_t sequences) const {
    const auto recompute = role.engine.recompute();
    if (recompute.granularity != Granularity::kSelective)
      return recomputed_layers(role) * operations_of(role, sequences) / 3;
    const std::array<std::int64_t, 1> length{setup_.longest_sequence};
    return real(sequences) * models::selective_flops(role.model, recompute.modules, length);
  }

  // Passes through the halves of layers that exchange activations: forward, and for learning two
  // more and those that are computed again.
  struct Rounds {
    double attention = 1;
    double mlp = 1;  // of layers without experts
    double moe = 1;  // of layers with experts
  };
  static Rounds rounds_of(const RoleSetup& role, bool learns) {
    if (!learns) return {};
    const auto recompute = role.engine.recompute();
    const double all = 3 + recomputed_layers(role);
    return {.attention = all,
            .mlp = all + (recompute.selects(&models::Recompute::Modules::mlp) ? 1 : 0),
            .moe = all + (recompute.selects(&models::Recompute::Modules::moe) ? 1 : 0)};
  }

  // Activations among the ranks of a layer: of each half of a layer an all-gather and a
  // reduce-scatter, in kBitwise also the inputs of products by rows; of experts a row for each rank
  // that has some of a token's choices, there and, in kFast, back, where kBitwise has one for each
  // choice.
  double exchanged(const RoleSetup& role,
                   const models::MeshShape& mesh,
                   double tokens,
                   const Rounds& rounds) const {
    const auto& model = role.model;
    const bool bitwise = role.engine.alignment == models::Alignment::kBitwise;
    const auto of_group = tokens / (mesh.dp() * mesh.cp());
    const auto hidden = real(model.hidden_size);
    double channels = 0;       // among tensor parallel ranks
    double expert_layers = 0;  // whose rows are sent
    for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
      const bool moe = model.is_moe_layer(layer);
      const double of_half = moe ? rounds.moe : rounds.mlp;
      if (moe) expert_layers += rounds.moe;
      channels += 2 * hidden * (rounds.attention + of_half);
      if (!bitwise) continue;
      const auto fed = moe ? model.moe_shared_expert_intermediate_size : model.ffn_hidden_size;
      channels += rounds.attention * real(models::gathered_channels(model, layer) - fed) +
                  of_half * real(fed);
    }
    double seconds = 0;
    if (mesh.tp() > 1)
      seconds += of_group * sent(mesh.tp()) * kBytesOfHidden * channels /
                 (mesh.pp() * rate_among(mesh.tp()));
    if (mesh.ep() > 1) {
      const auto choices = real(model.moe_router_topk);
      const auto ranks = mesh.ep() * (1 - std::pow(sent(mesh.ep()), choices));  // of a token
      seconds += expert_layers / mesh.pp() * of_group / mesh.tp() *
                 (ranks + (bitwise ? choices : ranks)) * sent(mesh.ep()) * kBytesOfHidden * hidden /
                 rate_among(mesh.tp() * mesh.ep());
    }
    return seconds;
  }

  // The time of a pipeline over that of its work.
  double bubble(const RoleSetup& role, const models::MeshShape& mesh, bool learns) const {
    if (mesh.pp() == 1) return 1;
    const auto chunks = static_cast<std::int64_t>(first_model(role).chunks().size());
    return 1 + (mesh.pp() - 1) / (micro_batches(role, mesh, learns) * real(chunks));
  }

  // The number of a rank for an update, or for a forward pass of all sequences.
  double micro_batches(const RoleSetup& role, const models::MeshShape& mesh, bool learns) const {
    const auto micro_batch = MemoryAdvice(role.memory, role.engine, first_model(role), role.trains)
                                 .largest_batch(!learns)
                                 .largest.tokens;
    const double share =
        learns ? real(role.epochs) / real(std::max<std::int64_t>(role.updates, 1)) : 1;
    const auto tokens =
        share * real(setup_.sequences * setup_.longest_sequence) / (mesh.dp() * mesh.cp());
    return std::max(1.0, std::ceil(tokens / real(micro_batch)));
  }

  // Each micro-batch reads and writes all gradients.
  double accumulated(const RoleSetup& role, const models::MeshShape& mesh) const {
    const auto updates = real(std::max<std::int64_t>(role.updates, 1));
    return updates * micro_batches(role, mesh, true) * 2 *
           real(first_model(role).memory(true).gradients) / setup_.device.memory_rate;
  }

  std::int64_t cached_sequences() const {
    for (const auto& group : rank_groups(setup_)) {
      if (!group.rollout) continue;
      const auto bytes = bytes_of(setup_, group, {"gen", Work::kGenerate}).kv_cache;
      const auto& model = *group.rollout;
      return bytes / (setup_.longest_sequence *
                      models::key_value_bytes(model.config(), model.mesh().tp(), model.layout()));
    }
    return 0;
  }

  const RunSetup& setup_;
};

}  // namespace

std::vector<PhaseSeconds> phase_seconds(const RunSetup& setup, const std::vector<Phase>& phases) {
  const StepClock clock(setup);
  std::vector<PhaseSeconds> all;
  for (const auto& phase : phases) {
    const auto& role = setup.roles[phase.role];
    const bool computes = phase.work == Work::kForward || phase.work == Work::kLearn;
    const bool moves = role.role == Role::kActor ? phase.work == Work::kReshard : computes;
    double seconds = moves ? clock.moved(role) : 0;
    if (phase.work == Work::kGenerate) seconds += clock.generated();
    if (phase.work == Work::kReshard) seconds += clock.resharded();
    if (phase.work == Work::kForward) seconds += clock.passes(role, false);
    if (phase.work == Work::kLearn) seconds += clock.passes(role, true);
    if (phase.work == Work::kStep) seconds += clock.updated(role, role.mesh());
    if (phase.work != Work::kSave) all.push_back({phase.name, seconds});
  }
  return all;
}

}  // namespace ferry::trainer
