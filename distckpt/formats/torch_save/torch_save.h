// A file that torch.save wrote: one object, whose tensors are records of one archive.
// docs/formats/torch_save.md. Nothing in it is ever executed.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/layout.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {

// The globals that pickles of training programs may name: torch values, and the types of arguments.
std::span<const std::string_view> object_globals();

class TorchFile {
 public:
  // Throws Error(kCorrupt) for anything but a whole zip archive whose pickle names nothing outside
  // `allowed_globals`. The hint is a command that saves the file anew, for those who trust it:
  // `python` is the expression of what to keep of `d`, which torch.load gives.
  TorchFile(const std::filesystem::path& path,
            std::span<const std::string_view> allowed_globals,
            std::string_view python);

  PickleValue root() const { return pickle_.root(); }
  Pickle take_pickle() && { return std::move(pickle_); }
  FileStorage storage() const { return storage_; }
  std::string source() const { return storage_.path.string(); }

  // Throws Error(kCorrupt) naming `name` unless `value` is a tensor that lies inside its storage.
  TensorItem tensor(PickleValue value, std::string_view name) const;

 private:
  TorchFile(const ReadFile& file,
            std::span<const std::string_view> allowed_globals,
            std::string hint);

  FileStorage storage_;
  TorchArchive archive_;
  Pickle pickle_;
};

}  // namespace ferry::distckpt
