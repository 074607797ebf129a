#include "converter/stored/locate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string_view>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace locate_test {

namespace fs = std::filesystem;
using support::fails;

// Folders of files that hold their own names: only names count.
class Locate : public testing::Test {
 protected:
  void touch(std::string_view name, std::string_view text = "") const {
    const auto path = dir_ / name;
    fs::create_directories(path.parent_path());
    distckpt::write_text(path, text.empty() ? name : text);
  }
  void touch_iteration(std::string_view folder) const {
    touch(std::string(folder) + "/.metadata");
    touch(std::string(folder) + "/metadata.json");
  }
  fs::path root() const { return dir_.path(); }

 private:
  support::TempDir dir_;
};

TEST_F(Locate, SafetensorsAreHuggingFace) {
  touch("config.json");
  touch("model.safetensors");
  const auto found = locate(root());
  EXPECT_EQ(found.format, Format::kHuggingFace);
  EXPECT_TRUE(found.has_own_config());
  EXPECT_TRUE(lacks_iterations(root()));
}

TEST_F(Locate, PickledWeightsAreTorchSave) {
  touch("pytorch_model-00001-of-00002.bin");
  EXPECT_EQ(locate(root()).format, Format::kTorchSave);
}

TEST_F(Locate, AnIndexOfPickledWeightsGoesBeforeAStraySafetensorsFile) {
  touch("old_epoch1.safetensors");
  touch("pytorch_model.bin.index.json");
  EXPECT_EQ(locate(root()).format, Format::kTorchSave);
  touch("model.safetensors");
  EXPECT_EQ(locate(root()).format, Format::kHuggingFace);
}

TEST_F(Locate, AFileOfAnArchiveIsItsFolder) {
  touch("weights-00001-of-00002.h5");
  const auto found = locate(root() / "weights-00001-of-00002.h5");
  EXPECT_EQ(found.format, Format::kArchive);
  EXPECT_EQ(found.folder, root());
}

TEST_F(Locate, TheTrackerChoosesAnIteration) {
  touch_iteration("iter_0000010");
  touch_iteration("iter_0000020");
  touch("latest_checkpointed_iteration.txt", "10\n");
  const auto found = locate(root());
  EXPECT_EQ(found.format, Format::kTorchDist);
  EXPECT_EQ(found.root, root());
  EXPECT_EQ(found.folder, root() / "iter_0000010");
  EXPECT_EQ(found.iteration->number, 10);
}

TEST_F(Locate, AnIterationThatIsNamedGoesBeforeTheTrackers) {
  touch_iteration("iter_0000010");
  touch_iteration("iter_0000020");
  touch("latest_checkpointed_iteration.txt", "10");
  EXPECT_EQ(locate(root(), distckpt::Iteration{20}).folder, root() / "iter_0000020");
}

TEST_F(Locate, SeveralIterationsWithoutATrackerWantOneToBeNamed) {
  touch_iteration("iter_0000010");
  touch_iteration("iter_0000020");
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"holds 2 iterations", "--iteration"}, [&] { locate(root()); }));
}

TEST_F(Locate, OneIterationNeedsNoTracker) {
  touch_iteration("release");
  EXPECT_EQ(locate(root()).folder, root() / "release");
  EXPECT_FALSE(lacks_iterations(root()));
}

TEST_F(Locate, NamesAnIterationThatTheTrackerNamesAndThatIsNotThere) {
  touch_iteration("iter_0000010");
  touch("latest_checkpointed_iteration.txt", "11");
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"iter_0000011", "latest_checkpointed_iteration.txt names it", "there: 10"},
                    [&] { locate(root()); }));
}

TEST_F(Locate, RefusesATrackerThatHoldsNoIteration) {
  touch_iteration("iter_0000010");
  touch("latest_checkpointed_iteration.txt", "latest");
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"\"latest\"", "neither a number"}, [&] { locate(root()); }));
}

TEST_F(Locate, AnIterationsFolderSaysItsIteration) {
  touch_iteration("iter_0000010");
  const auto found = locate(root() / "iter_0000010");
  EXPECT_EQ(found.iteration->number, 10);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"the folder of one iteration"},
                    [&] { locate(root() / "iter_0000010", distckpt::Iteration{10}); }));
}

TEST_F(Locate, ShardsWithoutMegatronsConfigAreTorchDcp) {
  touch(".metadata");
  touch("__0_0.distcp");
  EXPECT_EQ(locate(root()).format, Format::kDcp);
}

TEST_F(Locate, FoldersOfRanksAreLegacy) {
  touch("release/mp_rank_00/model_optim_rng.pt");
  EXPECT_EQ(locate(root()).format, Format::kLegacy);
}

TEST_F(Locate, ZarrArraysAreZarr) {
  touch("iter_0000010/metadata.json");
  touch("iter_0000010/decoder.weight/.zarray");
  EXPECT_EQ(locate(root()).format, Format::kZarr);
}

TEST_F(Locate, FilesOfVerlsActorAreFsdp) {
  touch("global_step_10/actor/model_world_size_2_rank_0.pt");
  touch("global_step_10/actor/huggingface/config.json");
  const auto found = locate(root() / "global_step_10");
  EXPECT_EQ(found.format, Format::kFsdp);
  EXPECT_EQ(found.iteration->number, 10);
  EXPECT_EQ(found.config_folder(), root() / "global_step_10/actor/huggingface");
}

TEST_F(Locate, RefusesAnIterationOfAFormatThatHasNone) {
  touch("model.safetensors");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"which has no iterations"},
                    [&] { locate(root(), distckpt::Iteration{1}); }));
}

TEST_F(Locate, SaysWhatItLookedFor) {
  touch("letter.txt");
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"holds no checkpoint", "latest_checkpointed_iteration.txt", "weights.h5"},
                    [&] { locate(root()); }));
  EXPECT_FALSE(holds_checkpoint(root()));
}

}  // namespace locate_test
}  // namespace ferry::converter
