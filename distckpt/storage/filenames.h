// Every name on disk that has a meaning, built and parsed here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::distckpt {

// Hugging Face.
inline constexpr std::string_view kHfConfig = "config.json";
inline constexpr std::string_view kPartRecord = "ferry-part.json";  // beside it, of a part
inline constexpr std::string_view kSafetensorsModel = "model.safetensors";
inline constexpr std::string_view kSafetensorsIndex = "model.safetensors.index.json";
inline constexpr std::string_view kSafetensorsSuffix = ".safetensors";

// "model.safetensors" if it is the only one, else "model-00002-of-00004.safetensors" (counted from
// 1).
std::string safetensors_filename(int index, int count);

inline constexpr std::string_view kTorchModel = "pytorch_model.bin";
inline constexpr std::string_view kTorchModelIndex = "pytorch_model.bin.index.json";
bool is_torch_model_filename(std::string_view name);  // also of one part, or of the index

// Megatron-Core, format torch_dist.
inline constexpr std::string_view kTracker = "latest_checkpointed_iteration.txt";
inline constexpr std::string_view kTorchDistMetadata = ".metadata";
inline constexpr std::string_view kTorchDistConfig = "metadata.json";
inline constexpr std::string_view kCommon = "common.pt";

// The folder of one iteration: "iter_0000010", or "release" for weights alone.
struct Iteration {
  std::optional<std::int64_t> number{};  // nothing: release
  bool operator==(const Iteration&) const = default;
};
std::string iteration_folder(const Iteration& iteration);
std::optional<Iteration> parse_iteration_folder(std::string_view name);

// The content of the tracker, and the value of --iteration: "10" or "release".
std::string iteration_text(const Iteration& iteration);
std::optional<Iteration> parse_iteration(std::string_view text);

std::string distcp_filename(int rank);  // "__3_0.distcp"
bool is_distcp_filename(std::string_view name);

// Megatron's legacy format: "mp_rank_01_003" is {1, 3}: tensor, then pipeline or expert parallel
// rank, or both. Nothing if the name is no such folder's.
inline constexpr std::string_view kRankFile = "model_optim_rng.pt";
std::optional<std::vector<int>> parse_rank_folder(std::string_view name);

// verl: "global_step_10", and in it, of FSDP, "model_world_size_8_rank_3.pt".
std::optional<Iteration> parse_step_folder(std::string_view name);
struct FsdpRank {
  int world_size = 0;
  int rank = 0;
};
std::string fsdp_filename(const FsdpRank& rank);
std::optional<FsdpRank> parse_fsdp_filename(std::string_view name);
// Our own archive: kArchiveFile if it is the only file, else "weights-00002-of-00004.h5" (counted
// from 1).
inline constexpr std::string_view kArchiveFile = "weights.h5";
std::string shard_store_filename(std::size_t index, std::size_t count);

// The number of files of the archive, if `name` is that of one of them.
std::optional<std::size_t> shard_store_file_count(std::string_view name);

// Our own: the sidecar of a Megatron checkpoint, and the working folder beside a target.
inline constexpr std::string_view kSidecar = "ferry";
inline constexpr std::string_view kSidecarIndex = "sidecar.json";
inline constexpr std::string_view kSidecarHf = "hf";
inline constexpr std::string_view kSidecarHeaders = "headers";
inline constexpr std::string_view kSidecarDerived = "derived.safetensors";
inline constexpr std::string_view kTemporarySuffix = ".ferry-tmp";
inline constexpr std::string_view kWorkMark = "ferry-work";  // says that it is one
inline constexpr std::string_view kWorkFiles = "files";      // that may be below "output"
inline constexpr std::string_view kWorkOutput = "output";
inline constexpr std::string_view kWorkRanks = "ranks";
inline constexpr std::string_view kWorkDamage = "damaged";
inline constexpr std::string_view kReplaced = "replaced";  // an old target on its way out
inline constexpr std::string_view kPublishing = "publishing";
inline constexpr std::string_view kJournal = "journal";
inline constexpr std::string_view kProofJournal = "proof";
inline constexpr std::string_view kRereadJournal = "reread";
std::filesystem::path work_folder(
    const std::filesystem::path& target);  // ".<name>.ferry" beside it

// A name that a file inside a checkpoint may carry: no folders, nothing above, not hidden by an
// absolute path. Throws Error(kCorrupt) naming `source`, which named it.
void require_plain_filename(std::string_view name, std::string_view source);

}  // namespace ferry::distckpt
