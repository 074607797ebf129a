#include "models/spec/sharding.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/spec/pipeline_stages.h"

namespace ferry::models {

using distckpt::Box;

std::vector<distckpt::ShardedTensor> ParameterSpec::sharded_tensors() const {
  std::vector<distckpt::ShardedTensor> shards;
  for (const auto& box : boxes) {
    shards.push_back({.key = key,
                      .dtype = dtype,
                      .local_shape = box.size,
                      .global_shape = global_shape,
                      .global_offset = box.offset,
                      .replica_id = replica_id});
  }
  return shards;
}

std::vector<Box> Cut::boxes(const distckpt::Shape& shape, int rank, int ranks) const {
  const auto part = shape[dim] / parts;
  const auto size = part / ranks;
  std::vector<Box> boxes;
  for (int i = 0; i < parts; ++i) {
    auto box = Box::whole(shape);
    box.offset[dim] = i * part + rank * size;
    box.size[dim] = size;
    boxes.push_back(box);
  }
  return boxes;
}

std::optional<Cut> cut_of(const WholeParameter& parameter, Alignment alignment) {
  switch (parameter.split) {
    case Split::kNone:
      return std::nullopt;
    case Split::kColumn:
      return Cut{.dim = 0, .parts = parameter.merge == Merge::kGateUp ? 2 : 1};
    case Split::kRow:
      return Cut{.dim = alignment == Alignment::kBitwise ? 0 : 1};
  }
  return std::nullopt;
}

std::optional<ParameterSpec> shard(const WholeParameter& parameter,
                                   const TransformerConfig& config,
                                   const MeshShape& mesh,
                                   const MeshCoordinates& at,
                                   const LayoutOptions& options) {
  const bool expert = parameter.expert.has_value();
  if (expert && *parameter.expert / (config.num_moe_experts / mesh.ep()) != at.ep)
    return std::nullopt;
  ParameterSpec spec{
      .key = single_key(parameter),
      .dtype = parameter.fp32 || parameter.trained_in_fp32 ? distckpt::DType::kF32 : options.dtype,
      .shape = parameter.shape,
      .replica_id = {0, 0, expert ? at.edp : at.dp * mesh.cp() + at.cp},
      .expert = expert,
      .vocab = parameter.vocabulary ? config.vocab_size : -1,
      .trained = !parameter.fp32,
  };
  if (parameter.vocabulary) spec.shape[0] = mesh.parallel().padded_vocab_size(parameter.shape[0]);
  spec.global_shape = spec.shape;
  const int ranks = expert ? mesh.etp() : mesh.tp();
  const int rank = expert ? at.etp : at.tp;
  const auto cut = cut_of(parameter, options.alignment);
  if (!cut) {
    spec.boxes = {Box::whole(spec.shape)};
    spec.replica_id[1] = rank;
    return spec;
  }
  const auto size = spec.shape[cut->dim];
  require(size % (std::int64_t{cut->parts} * ranks) == 0, ErrorKind::kUsage,
          "{}: {} {} cannot be split over {} ranks", spec.key, size / cut->parts,
          cut->dim == 0 ? "rows" : "columns", ranks);
  spec.boxes = cut->boxes(spec.shape, rank, ranks);
  spec.shape[cut->dim] = size / ranks;
  spec.sharing = Sharing::kSharded;
  return spec;
}

std::vector<StageSpec> stage_chunks(const TransformerConfig& config,
                                    const ParallelConfig& parallel,
                                    int stage) {
  const auto stages = pipeline_stages(parallel, static_cast<int>(config.num_layers),
                                      static_cast<int>(config.mtp_num_layers));
  std::vector<StageSpec> chunks;
  for (int chunk = 0; chunk < stages.num_chunks; ++chunk) {
    StageSpec spec{.stage = stage,
                   .chunk = chunk,
                   .pre_process = stage == stages.embedding && chunk == 0,
                   .post_process = stage == stages.loss && chunk == stages.num_chunks - 1};
    const auto collect = [&](const std::vector<int>& of, const std::vector<int>& chunk_of,
                             std::vector<std::int64_t>& into) {
      for (std::size_t i = 0; i < of.size(); ++i) {
        if (of[i] == stage && chunk_of[i] == chunk) into.push_back(static_cast<std::int64_t>(i));
      }
    };
    collect(stages.layers, stages.layer_chunks, spec.layers);
    collect(stages.mtp, stages.mtp_chunks, spec.mtp);
    chunks.push_back(std::move(spec));
  }
  return chunks;
}

std::vector<int> embedding_stages(const TransformerConfig& config, const ParallelConfig& parallel) {
  std::vector<int> stages;
  for (int stage = 0; stage < parallel.pipeline_model_parallel_size; ++stage) {
    const auto chunks = stage_chunks(config, parallel, stage);
    const bool holds = std::ranges::any_of(chunks, [&](const StageSpec& chunk) {
      return chunk.pre_process || !chunk.mtp.empty() || (chunk.post_process && config.is_tied());
    });
    if (holds) stages.push_back(stage);
  }
  return stages;
}

namespace {

// Throws unless all layers that add a feature of the tower lie beside it, as Megatron-Bridge does.
void check_deepstack(const TransformerConfig& config, const StageSpec& stage) {
  const auto features = std::ssize(config.vision->deepstack_visual_indexes);
  const auto here =
      std::ranges::count_if(stage.layers, [&](std::int64_t layer) { return layer < features; });
  if (here == features) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("the vision tower is trained on the first stage, whose first chunk has "
                          "{} of the {} layers that add what it gives",
                          here, features),
              "choose fewer stages or chunks, num_layers_in_first_pipeline_stage, or "
              "freeze_vision_tower=true");
}

}  // namespace

std::vector<ParameterSpec> parameter_layout(const TransformerConfig& config,
                                            const MeshShape& mesh,
                                            const MeshCoordinates& at,
                                            const StageSpec& stage,
                                            const LayoutOptions& options) {
  std::vector<ParameterSpec> specs;
  const auto local = config.num_moe_experts / mesh.ep();
  const ExpertRange experts{.begin = at.ep * local, .end = (at.ep + 1) * local};
  const auto add = [&](const std::vector<Section>& sections) {
    for (const auto& section : sections) {
      for (const auto& parameter : parameters_of(section, config, experts))
        specs.push_back(*shard(parameter, config, mesh, at, options));
    }
  };
  // A tied head on another stage than the embedding, and prediction layers, hold it a second time.
  bool holds_embedding = stage.pre_process;
  const auto add_embedding = [&](int copy) {
    add({{.stage = Stage::kFirst, .table = &kEmbeddingSection}});
    specs.back().replica_id[0] = copy;
  };
  if (options.vision_tower && stage.pre_process && config.computes_vision()) {
    check_deepstack(config, stage);
    specs = vision_layout(config, mesh, at, options);
  }
  if (holds_embedding) add_embedding(0);
  for (const auto layer : stage.layers) add(layer_sections(config, layer));
  if (!stage.mtp.empty() && !holds_embedding) {
    add_embedding(1);
    holds_embedding = true;
  }
  for (const auto index : stage.mtp) add(prediction_sections(config, index));
  if (!stage.post_process) return specs;
  add({{.stage = Stage::kLast, .table = &kHeadSection}});
  if (config.is_tied() && !holds_embedding) add_embedding(1);
  return specs;
}

std::vector<ParameterSpec> vision_layout(const TransformerConfig& config,
                                         const MeshShape& mesh,
                                         const MeshCoordinates& at,
                                         const LayoutOptions& options) {
  std::vector<ParameterSpec> specs;
  for (const auto& section : vision_sections(config)) {
    for (const auto& parameter : parameters_of(section, config, {}))
      specs.push_back(*shard(parameter, config, mesh, at, options));
  }
  return specs;
}

std::string_view name_of(MeshSize size) {
  switch (size) {
    case MeshSize::kTp:
      return "tp";
    case MeshSize::kEp:
      return "ep";
    case MeshSize::kEtp:
      return "etp";
  }
  fail(ErrorKind::kBug, "a size of a mesh without a name");
}

std::optional<Indivisible> find_indivisible(const TransformerConfig& config,
                                            const ParallelConfig& parallel,
                                            Alignment alignment) {
  const int tp = parallel.tensor_model_parallel_size;
  if (config.num_attention_heads % tp != 0)
    return Indivisible{MeshSize::kTp,
                       fmt::format("{} attention heads", config.num_attention_heads)};
  if (config.has_linear_attention() && config.linear_num_key_heads % tp != 0)
    return Indivisible{MeshSize::kTp, fmt::format("{} key heads of linear attention",
                                                  config.linear_num_key_heads)};
  if (config.is_hybrid_model() && config.mamba_num_groups % tp != 0)
    return Indivisible{MeshSize::kTp,
                       fmt::format("{} groups of Mamba layers", config.mamba_num_groups)};
  if (config.num_moe_experts % parallel.expert_model_parallel_size != 0)
    return Indivisible{MeshSize::kEp, fmt::format("{} experts", config.num_moe_experts)};
  const auto find_in = [&](const Section& section) -> std::optional<Indivisible> {
    const auto sizes = layer_sizes(section, config);
    const auto& own = sizes ? *sizes : config;
    for (const auto& parameter : parameters_of(section, config, {0, 1})) {
      const auto cut = cut_of(parameter, alignment);
      if (!cut) continue;
      const int ranks = parameter.expert ? parallel.expert_tensor_parallel() : tp;
      if (parameter.merge == Merge::kQkvGroups && !own.shares_query_groups(ranks)) {
        return Indivisible{MeshSize::kTp, fmt::format("{} query groups of {}", own.num_query_groups,
                                                      parameter.key)};
      }
      const auto size = parameter.vocabulary ? parallel.padded_vocab_size(parameter.shape[0])
                                             : parameter.shape[cut->dim];
      if (size / cut->parts % ranks == 0) continue;
      // Experts without a size of their own are split like the rest of the model.
      return Indivisible{
          parameter.expert && parallel.expert_tensor_parallel_size ? MeshSize::kEtp : MeshSize::kTp,
          fmt::format("{} {} of {}", size / cut->parts, cut->dim == 0 ? "rows" : "columns",
                      parameter.key)};
    }
    return std::nullopt;
  };
  std::vector<Section> sections{{.stage = Stage::kFirst, .table = &kEmbeddingSection}};
  // Layers of a kind are alike: the first of each.
  const auto add_first = [&](const auto& is_of_kind) {
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      if (!is_of_kind(layer)) continue;
      for (auto& section : layer_sections(config, layer)) sections.push_back(std::move(section));
      return;
    }
  };
  if (config.is_hybrid_model()) {
    for (const char letter : kHybridLetters) {
      add_first([&](std::int64_t layer) {
        return config.hybrid_layer_pattern[static_cast<std::size_t>(layer)] == letter;
      });
    }
  } else {
    using Kind = std::pair<bool, bool>;
    const bool two_sizes = config.has_global_attention();
    for (const auto& kind : {Kind{false, false}, {false, true}, {true, false}, {true, true}}) {
      add_first([&](std::int64_t layer) {
        const bool other = two_sizes ? config.window_of(layer).has_value()
                                     : config.is_linear_attention_layer(layer);
        return Kind{config.is_moe_layer(layer), other} == kind;
      });
    }
  }
  if (config.mtp_num_layers > 0) {
    for (auto& section : prediction_sections(config, 0)) sections.push_back(std::move(section));
  }
  sections.push_back({.stage = Stage::kLast, .table = &kHeadSection});
  for (const auto& section : sections) {
    if (auto found = find_in(section)) return found;
  }
  return std::nullopt;
}

namespace {

// A part of the model that no module computes; empty if there is none.
std::string_view not_computed(const TransformerConfig& config) {
  if (config.is_hybrid_model()) return "Mamba layers";
  if (config.is_sparse()) return "sparse attention";
  if (config.has_global_attention()) return "attention of two sizes";
  if (!config.traits.not_computed.empty()) return config.traits.not_computed;
  const bool experts_alone = config.moe_shared_expert_intermediate_size == 0 &&
                             config.num_moe_experts > 0 &&
                             std::ranges::count(config.moe_layer_freq, false) == 0;
  const bool dense = config.num_moe_experts == 0;
  if (config.activation != Activation::kSilu &&
      !(config.activation == Activation::kQuickGeglu && experts_alone) &&
      !(config.activation == Activation::kGeluTanh && dense))
    return "an activation other than SiLU";
  if (config.post_norm == PostNorm::kOfLinear && !config.softmax_scale)
    return "settings that Megatron's arguments do not name (--hf-config says them)";
  return {};
}

}  // namespace

void check_fits(const TransformerConfig& config, const MeshShape& mesh) {
  const auto missing = not_computed(config);
  require(missing.empty(), ErrorKind::kLayout,
          "models of the family {} are not computed: they have {}", config.family, missing);
  require(!config.qk_layernorm_full || mesh.tp() <= config.num_query_groups, ErrorKind::kUsage,
          "tp is {}, and norms of queries and keys over all heads take at most as many ranks as "
          "there are query groups, {}",
          mesh.tp(), config.num_query_groups);
  require(config.num_moe_experts > 0 || mesh.ep() == 1, ErrorKind::kUsage,
          "ep is {}, and the model has no experts", mesh.ep());
  for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
    if (const auto found = find_indivisible(config, mesh.parallel(), alignment)) {
      const auto size = found->size;
      fail(ErrorKind::kUsage, "{} cannot be split by {} {}", found->what, name_of(size),
           size == MeshSize::kTp   ? mesh.tp()
           : size == MeshSize::kEp ? mesh.ep()
                                   : mesh.etp());
    }
  }
  require(config.linear_num_key_heads % (std::int64_t{mesh.tp()} * mesh.cp()) == 0,
          ErrorKind::kUsage,
          "{} key heads of linear attention cannot be split by tp {} and then by cp {}",
          config.linear_num_key_heads, mesh.tp(), mesh.cp());
  const auto stages = pipeline_stages(mesh.parallel(), static_cast<int>(config.num_layers),
                                      static_cast<int>(config.mtp_num_layers));
  for (std::size_t i = 0; i < stages.mtp.size(); ++i) {
    require(stages.mtp[i] == stages.loss && stages.mtp_chunks[i] == stages.num_chunks - 1,
            ErrorKind::kUsage, "prediction layer {} has to lie in the chunk of the loss", i);
  }
}

}  // namespace ferry::models
