#include "distckpt/formats/torch_save/torch_save.h"

#include <array>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace {

using namespace std::string_view_literals;

constexpr std::array kObjectGlobals{
    "torch."sv,
    "collections.OrderedDict"sv,
    "argparse.Namespace"sv,
    "signal.Signals"sv,
    "megatron.core."sv,
    "megatron.training."sv,
    "types.SimpleNamespace"sv,
    "pathlib.PosixPath"sv,
    "pathlib._local.PosixPath"sv,
    "_codecs.encode"sv,
    "_io.BytesIO"sv,
    "io.BytesIO"sv,
    "numpy."sv,
    "builtins.set"sv,
    "builtins.frozenset"sv,
    "builtins.bytearray"sv,
    "builtins.complex"sv,
    "builtins.slice"sv,
};

std::string save_anew(const std::filesystem::path& path, std::string_view python) {
  return fmt::format(
      "if you trust it, save it anew, in a copy, with torch: python3 -c \"import sys,torch; "
      "f=sys.argv[1]; d=torch.load(f,map_location='cpu',weights_only=False); torch.save({},f)\" {}",
      python, shell_quoted(path.string()));
}

// Before torch 1.6 torch.save wrote pickles one behind the other, the first of them a magic number.
TorchArchive open_archive(const ReadFile& file) {
  constexpr std::array<unsigned char, 14> kMagic{0x80, 0x02, 0x8A, 0x0A, 0x6C, 0xFC, 0x9C,
                                                 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19};
  std::array<unsigned char, kMagic.size()> head{};
  if (file.size() >= static_cast<std::int64_t>(head.size()))
    file.read_at(0, std::as_writable_bytes(std::span(head)));
  if (head != kMagic) return read_torch_archive(file, 0, file.size());
  throw Error(ErrorKind::kCorrupt,
              fmt::format("{}: is in the format that torch.save had before torch 1.6, which is no "
                          "zip archive and is not read",
                          file.path().string()),
              save_anew(file.path(), "d"));
}

}  // namespace

std::span<const std::string_view> object_globals() {
  return kObjectGlobals;
}

TorchFile::TorchFile(const std::filesystem::path& path,
                     std::span<const std::string_view> allowed_globals,
                     std::string_view python)
    : TorchFile(ReadFile(path), allowed_globals, save_anew(path, python)) {}

TorchFile::TorchFile(const ReadFile& file,
                     std::span<const std::string_view> allowed_globals,
                     std::string hint)
    : storage_{.path = file.path(), .size = file.size()},
      archive_(open_archive(file)),
      pickle_(Pickle::parse(read_torch_record(file, archive_.at("data.pkl")),
                            {.source = archive_.source,
                             .first_byte = archive_.at("data.pkl").offset,
                             .allowed_globals = allowed_globals,
                             .foreign_hint = std::move(hint)})) {}

TensorItem TorchFile::tensor(PickleValue value, std::string_view name) const {
  require(is_tensor(value), ErrorKind::kCorrupt, "{}: {}: is {}, not a tensor", source(), name,
          value.describe());
  return with_context([&] { return fmt::format("reading {}", name); },
                      [&] { return parse_tensor(value, archive_); });
}

}  // namespace ferry::distckpt
