#include <bit>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using distckpt::Pickle;
using distckpt::PickleKind;
using distckpt::PickleValue;
using distckpt::PickleWriter;

constexpr std::string_view kGlobals[] = {"torch.", "argparse.Namespace", "collections.OrderedDict",
                                         "builtins.set", "builtins.frozenset"};

Pickle parse(std::string_view bytes) {
  return Pickle::parse(std::string(bytes), {.source = "fuzz", .allowed_globals = kGlobals});
}

// The accessor of a kind answers, all others refuse.
void expect_one_kind(PickleValue value) {
  const auto kind = value.kind();
  const auto answers = [&](bool right, auto&& access) {
    expect(accepts([&] { access(); }) == right, "{} answers as another kind, or not as its own",
           value.describe());
  };
  answers(kind == PickleKind::kBool, [&] { value.as_bool(); });
  answers(kind == PickleKind::kInt, [&] { value.as_int(); });
  answers(kind == PickleKind::kInt || kind == PickleKind::kFloat, [&] { value.as_float(); });
  answers(kind == PickleKind::kString, [&] { value.as_string(); });
  answers(kind == PickleKind::kBytes || kind == PickleKind::kBigInt, [&] { value.as_bytes(); });
  answers(kind == PickleKind::kList || kind == PickleKind::kTuple || kind == PickleKind::kSet,
          [&] { value.elements(); });
  answers(kind == PickleKind::kDict, [&] { value.items(); });
  answers(kind == PickleKind::kGlobal, [&] { value.global_name(); });
  answers(kind == PickleKind::kObject, [&] { value.object_class(); });
  answers(kind == PickleKind::kPersistentId, [&] { value.persistent_id(); });
}

std::vector<PickleValue> children(PickleValue value) {
  std::vector<PickleValue> found;
  switch (value.kind()) {
    case PickleKind::kList:
    case PickleKind::kTuple:
    case PickleKind::kSet:
      for (const PickleValue element : value.elements()) found.push_back(element);
      break;
    case PickleKind::kDict:
      for (const auto& [key, item] : value.items()) {
        found.push_back(key);
        found.push_back(item);
      }
      break;
    case PickleKind::kObject:
      found = {value.object_args(), value.object_state(), value.object_items(),
               value.object_appended()};
      break;
    case PickleKind::kPersistentId:
      found = {value.persistent_id()};
      break;
    default:
      break;
  }
  return found;
}

void walk(PickleValue root) {
  constexpr std::size_t kMaxVisits = 1'000;  // what holds itself has no end
  constexpr std::size_t kMaxTried = 20;      // refusals take time
  std::vector<PickleValue> pending{root};
  for (std::size_t visits = 0; visits < kMaxVisits && !pending.empty(); ++visits) {
    const auto value = pending.back();
    pending.pop_back();
    if (visits < kMaxTried) expect_one_kind(value);
    expect(value.describe(40).size() < 40 + 1'100, "{} characters",  // a global's name is whole
           value.describe(40).size());
    distckpt::as_size(value);
    for (const auto& child : children(value)) pending.push_back(child);
  }
}

// Emits what a PickleWriter has words for; false for anything else.
bool emit(PickleValue value, PickleWriter& out);

bool emit_all(PickleValue container, PickleWriter& out) {
  for (const auto& child : children(container)) {
    if (!emit(child, out)) return false;
  }
  return true;
}

// A class whose name a reader takes for more than a name is left alone.
bool is_plain(std::string_view name) {
  return !name.starts_with("builtins.") && name != "collections.OrderedDict";
}

bool emit_object(PickleValue value, PickleWriter& out) {
  const auto name = value.object_class();
  if (!is_plain(name) || !value.object_items().is_none() || !value.object_appended().is_none())
    return false;
  const auto args = value.object_args();
  const auto state = value.object_state();
  if (args.size() > 0) {
    if (!state.is_none()) return false;
    out.begin_call(name);
    if (!emit_all(args, out)) return false;
    out.end_call();
    return true;
  }
  if (state.is_none()) {
    out.begin_object(name).end_object();
    return true;
  }
  if (state.kind() == PickleKind::kTuple) return false;  // of slots, maybe: read as their dict
  out.begin_object_with_state(name);
  if (!emit(state, out)) return false;
  out.end_object_with_state();
  return true;
}

bool emit(PickleValue value, PickleWriter& out) {
  switch (value.kind()) {
    case PickleKind::kNone:
      out.none();
      return true;
    case PickleKind::kBool:
      out.boolean(value.as_bool());
      return true;
    case PickleKind::kInt:
      out.integer(value.as_int());
      return true;
    case PickleKind::kFloat:
      out.real(value.as_float());
      return true;
    case PickleKind::kString:
      out.string(value.as_string());
      return true;
    case PickleKind::kGlobal:
      if (!is_plain(value.global_name())) return false;
      out.global(value.global_name());
      return true;
    case PickleKind::kTuple:
      out.begin_tuple();
      if (!emit_all(value, out)) return false;
      out.end_tuple();
      return true;
    case PickleKind::kList:
      out.begin_list();
      if (!emit_all(value, out)) return false;
      out.end_list();
      return true;
    case PickleKind::kDict:
      out.begin_dict();
      if (!emit_all(value, out)) return false;
      out.end_dict();
      return true;
    case PickleKind::kObject:
      return emit_object(value, out);
    default:
      return false;
  }
}

void expect_equal(PickleValue a, PickleValue b) {
  expect(a.kind() == b.kind(), "{} is read back as {}", a.describe(), b.describe());
  if (a.kind() == PickleKind::kFloat) {
    expect(std::bit_cast<std::uint64_t>(a.as_float()) == std::bit_cast<std::uint64_t>(b.as_float()),
           "{} is read back as {}", a.as_float(), b.as_float());
  }
  const auto inside_a = children(a);
  const auto inside_b = children(b);
  expect(inside_a.size() == inside_b.size(), "{} is read back as {}", a.describe(), b.describe());
  if (inside_a.empty() || a.kind() == PickleKind::kObject) {
    expect(a.describe() == b.describe(), "{} is read back as {}", a.describe(), b.describe());
  }
  for (std::size_t i = 0; i < inside_a.size(); ++i) expect_equal(inside_a[i], inside_b[i]);
}

}  // namespace

void pickle(std::string_view input) {
  std::optional<Pickle> parsed;
  if (!accepts([&] { parsed = parse(input); })) return;
  expect(parsed->memory_bytes() <= 256 * input.size() + 4'096, "{} bytes of memory for {}",
         parsed->memory_bytes(), input.size());
  const auto root = parsed->root();
  walk(root);
  const bool tree = accepts([&] { root.require_tree(4'096, 64); });
  PickleWriter again;
  if (tree && emit(root, again)) expect_equal(root, parse(again.finish()).root());
}

}  // namespace ferry::fuzz
