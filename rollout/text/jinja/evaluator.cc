#include "rollout/text/jinja/evaluator.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/jinja/library.h"

namespace ferry::rollout::text::jinja {
namespace {

using Kind = Node::Kind;

constexpr std::int64_t kMostSteps = 5'000'000;
constexpr int kDeepest = 1500;  // calls of this program, which has a stack of 8 MiB

// The variables of a template, of one round of a loop, or of a macro's call.
struct Scope {
  std::shared_ptr<Scope> parent{};
  Dict variables{};

  const Value* find(std::string_view name) const {
    for (const auto* scope = this; scope != nullptr; scope = scope->parent.get()) {
      if (const auto* value = scope->variables.find(name)) return value;
    }
    return nullptr;
  }
};
using ScopePtr = std::shared_ptr<Scope>;

class Evaluator {
 public:
  enum class Flow { kOn, kBreak, kContinue };

  Flow run(const Node& node, const ScopePtr& scope, std::string& out) {
    const Step step(*this);
    try {
      return run_statement(node, scope, out);
    } catch (Error& error) {
      if (std::exchange(located_, true)) throw;
      throw Error(error.kind(), fmt::format("line {}: {}", node.line, error.what()));
    }
  }

 private:
  class Step {
   public:
    explicit Step(Evaluator& evaluator) : depth_(evaluator.depth_) {
      if (++evaluator.steps_ > kMostSteps) fail_template("the template takes too many steps");
      if (depth_ >= kDeepest) fail_template("calls are nested too deep");
      ++depth_;
    }
    ~Step() { --depth_; }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    int& depth_;
  };

  static ScopePtr inside(const ScopePtr& parent) {
    auto scope = std::make_shared<Scope>();
    scope->parent = parent;
    return scope;
  }

  // --------------------------------------------------------------------------------- statements

  Flow run_statement(const Node& node, const ScopePtr& scope, std::string& out) {
    switch (node.kind) {
      case Kind::kOutput:
        out = bounded(std::move(out) + (node.children.empty()
                                            ? node.value.string()
                                            : evaluate(*node.children[0], scope).str()));
        return Flow::kOn;
      case Kind::kBlock:
        for (const auto& child : node.children) {
          const auto flow = run(*child, scope, out);
          if (flow != Flow::kOn) return flow;
        }
        return Flow::kOn;
      case Kind::kIf: {
        const bool holds = evaluate(*node.children[0], scope).truthy();
        const auto& branch = node.children[holds ? 1 : 2];
        return branch == nullptr ? Flow::kOn : run(*branch, scope, out);
      }
      case Kind::kFor:
        return run_loop(node, scope, out);
      case Kind::kSet:
        assign(*node.children[0], evaluate(*node.children[1], scope), scope);
        return Flow::kOn;
      case Kind::kSetBlock: {
        std::string text;
        run(*node.children[1], inside(scope), text);
        const auto* filters = node.children[2].get();
        assign(*node.children[0], filters == nullptr ? Value(text) : filter(*filters, scope, &text),
               scope);
        return Flow::kOn;
      }
      case Kind::kFilterBlock: {
        std::string text;
        run(*node.children[0], inside(scope), text);
        out = bounded(std::move(out) + filter(*node.children[1], scope, &text).str());
        return Flow::kOn;
      }
      case Kind::kMacro:
        scope->variables.set(node.text, macro(node, scope));
        return Flow::kOn;
      case Kind::kBreak:
        return Flow::kBreak;
      case Kind::kContinue:
        return Flow::kContinue;
      default:
        fail(ErrorKind::kBug, "an expression where a statement belongs");
    }
  }

  void assign(const Node& target, const Value& value, const ScopePtr& scope) {
    if (target.kind == Kind::kName) {
      scope->variables.set(target.text, value);
    } else if (target.kind == Kind::kAttribute) {
      const auto object = evaluate(*target.children[0], scope);
      if (!object.is_dict() || !object.dict().is_namespace) {
        fail_template("cannot assign attribute on non-namespace object");
      }
      object.mutable_dict().set(target.text, value);
    } else {
      const auto items = value.iterate();
      if (items.size() != target.children.size()) {
        fail_template(fmt::format("{} values for {} names", items.size(), target.children.size()));
      }
      for (std::size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i], scope);
    }
  }

  Flow run_loop(const Node& node, const ScopePtr& scope, std::string& out) {
    auto items = evaluate(*node.children[1], scope).iterate();
    if (const auto* condition = node.children[2].get()) {
      std::erase_if(items, [&](const Value& item) {
        const auto own = inside(scope);
        assign(*node.children[0], item, own);
        return !evaluate(*condition, own).truthy();
      });
    }
    const auto changed_before = std::make_shared<std::optional<std::vector<Value>>>();
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto own = inside(scope);
      own->variables.set("loop", loop_at(items, i, changed_before));
      assign(*node.children[0], items[i], own);
      if (run(*node.children[3], own, out) == Flow::kBreak) break;
    }
    const auto* otherwise = node.children[4].get();
    return items.empty() && otherwise != nullptr ? run(*otherwise, inside(scope), out) : Flow::kOn;
  }

  static Value loop_at(const std::vector<Value>& items,
                       std::size_t at,
                       const std::shared_ptr<std::optional<std::vector<Value>>>& before) {
    const auto number = [](std::size_t n) { return Value(static_cast<std::int64_t>(n)); };
    const auto neighbour = [&](bool there, std::size_t i, const char* which) -> Value {
      if (!there) return Undefined{fmt::format("there is no {} item", which)};
      return items[i];
    };
    Dict loop{.is_namespace = true};
    loop.items = {
        {"index", number(at + 1)},
        {"index0", number(at)},
        {"revindex", number(items.size() - at)},
        {"revindex0", number(items.size() - at - 1)},
        {"first", at == 0},
        {"last", at + 1 == items.size()},
        {"length", number(items.size())},
        {"depth", std::int64_t{1}},
        {"depth0", std::int64_t{0}},
        {"previtem", neighbour(at > 0, at - 1, "previous")},
        {"nextitem", neighbour(at + 1 < items.size(), at + 1, "next")},
        {"cycle", Function{"cycle",
                           [at](const Arguments& given) {
                             if (given.positional.empty())
                               fail_template("no items for cycling given");
                             return given.positional[at % given.positional.size()];
                           }}},
        {"changed", Function{"changed",
                             [before](const Arguments& given) -> Value {
                               const bool changed = *before != given.positional;
                               *before = given.positional;
                               return changed;
                             }}},
    };
    return loop;
  }

  // The node outlives the value, which ends with the rendering.
  Value macro(const Node& node, const ScopePtr& defined_in) {
    return Function{
        node.text,
        [this, &node, scope = std::weak_ptr(defined_in)](const Arguments& given) -> Value {
          const auto parent = scope.lock();
          if (!parent) fail_template("a macro outlives the loop that it stands in");
          return call_macro(node, given, parent);
        }};
  }

  Value call_macro(const Node& node, const Arguments& given, const ScopePtr& parent) {
    const auto own = inside(parent);
    const auto& names = node.names;
    if (given.positional.size() > names.size()) {
      fail_template(
          fmt::format("macro '{}' takes not more than {} argument(s)", node.text, names.size()));
    }
    for (const auto& [name, value] : given.named) {
      if (std::ranges::find(names, name) == names.end()) {
        fail_template(fmt::format("macro '{}' takes no keyword argument '{}'", node.text, name));
      }
    }
    const auto first_default = names.size() - (node.children.size() - 1);
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto named =
          std::ranges::find(given.named, names[i], [](auto& one) { return one.first; });
      const bool by_name = named != given.named.end();
      if (i < given.positional.size()) {
        if (by_name) {
          fail_template(fmt::format("macro '{}' got two values for '{}'", node.text, names[i]));
        }
        own->variables.set(names[i], given.positional[i]);
      } else if (by_name) {
        own->variables.set(names[i], named->second);
      } else if (i >= first_default) {
        const auto& otherwise = *node.children[1 + i - first_default];
        own->variables.set(names[i], evaluate(otherwise, own));
      } else {
        own->variables.set(names[i],
                           Undefined{fmt::format("parameter '{}' was not provided", names[i])});
      }
    }
    std::string text;
    run(*node.children[0], own, text);
    return text;
  }

  // -------------------------------------------------------------------------------- expressions

  Value evaluate(const Node& node, const ScopePtr& scope) {
    const Step step(*this);
    const auto child = [&](std::size_t i) -> Value {
      return node.children[i] == nullptr ? Value() : evaluate(*node.children[i], scope);
    };
    switch (node.kind) {
      case Kind::kConstant:
        return node.value;
      case Kind::kName: {
        const auto* found = scope->find(node.text);
        return found == nullptr ? global_function(node.text) : *found;
      }
      case Kind::kList:
      case Kind::kTuple: {
        List list{.is_tuple = node.kind == Kind::kTuple};
        for (std::size_t i = 0; i < node.children.size(); ++i) list.items.push_back(child(i));
        return list;
      }
      case Kind::kDict: {
        Dict dict;
        for (std::size_t i = 0; i < node.children.size(); i += 2) {
          const auto key = child(i);
          dict.set_key(key, child(i + 1));
        }
        return dict;
      }
      case Kind::kUnary:
        if (node.text == "not") return !child(0).truthy();
        return node.text == "-" ? negative(child(0)) : negative(negative(child(0)));
      case Kind::kBinary: {
        auto left = child(0);
        if (node.text == "and") return left.truthy() ? child(1) : left;
        if (node.text == "or") return left.truthy() ? left : child(1);
        return binary(node.text, left, child(1));
      }
      case Kind::kCompare: {
        auto left = child(0);
        for (std::size_t i = 0; i < node.names.size(); ++i) {
          auto right = child(i + 1);
          if (!compare(node.names[i], left, right)) return false;
          left = std::move(right);
        }
        return true;
      }
      case Kind::kCondition:
        if (child(1).truthy()) return child(0);
        if (node.children[2] != nullptr) return child(2);
        return Undefined{"the inline if-expression evaluated to false and has no else"};
      case Kind::kAttribute:
        return attribute(child(0), node.text);
      case Kind::kItem:
        return item(child(0), child(1));
      case Kind::kSlice:
        return slice(child(0), child(1), child(2), child(3));
      case Kind::kCall:
        return call(child(0), arguments(node, scope));
      case Kind::kFilter:
        return filter(node, scope, nullptr);
      case Kind::kTest: {
        // An undefined value may be tested: only its use is an error.
        const auto value = child(0);
        return apply_test(node.text, value, arguments(node, scope));
      }
      default:
        fail(ErrorKind::kBug, "a statement where an expression belongs");
    }
  }

  static bool compare(std::string_view symbol, const Value& a, const Value& b) {
    if (symbol == "==") return a == b;
    if (symbol == "!=") return !(a == b);
    if (symbol == "in") return b.contains(a);
    if (symbol == "not in") return !b.contains(a);
    for (const auto* side : {&a, &b}) {
      if (side->is_undefined()) fail_template(side->undefined().what);
    }
    if (symbol == "<") return less(a, b);
    if (symbol == ">") return less(b, a);
    if (a == b) return true;
    return symbol == "<=" ? less(a, b) : less(b, a);
  }

  static Value call(const Value& function, const Arguments& given) {
    if (function.is_undefined()) fail_template(function.undefined().what);
    if (!function.is_function()) {
      fail_template(fmt::format("'{}' object is not callable", function.type_name()));
    }
    return function.function().call(given);
  }

  Arguments arguments(const Node& node, const ScopePtr& scope) {
    Arguments given;
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      auto value = evaluate(*node.children[i + 1], scope);
      if (node.names[i].empty()) {
        given.positional.push_back(std::move(value));
      } else {
        given.named.emplace_back(node.names[i], std::move(value));
      }
    }
    return given;
  }

  // `block`: the text that the filters of a {% set %} or {% filter %} block apply to, else null.
  Value filter(const Node& node, const ScopePtr& scope, const std::string* block) {
    const auto* inner = node.children[0].get();
    const auto value = inner == nullptr   ? Value(*block)
                       : block != nullptr ? filter(*inner, scope, block)
                                          : evaluate(*inner, scope);
    return apply_filter(node.text, value, arguments(node, scope));
  }

  std::int64_t steps_ = 0;
  int depth_ = 0;
  bool located_ = false;  // the error in flight names its line
};

}  // namespace

std::string render(const Node& root, const Dict& variables) {
  const auto outer = std::make_shared<Scope>();
  outer->variables = variables;
  const auto scope = std::make_shared<Scope>();
  scope->parent = outer;
  std::string text;
  Evaluator().run(root, scope, text);
  return text;
}

void require_known_names(const Node& root) {
  const bool known = root.kind == Kind::kFilter ? is_filter(root.text)
                     : root.kind == Kind::kTest ? is_test(root.text)
                                                : true;
  if (!known) {
    fail_template(fmt::format("line {}: the {} {} is not supported", root.line,
                              root.kind == Kind::kFilter ? "filter" : "test", root.text));
  }
  for (const auto& child : root.children) {
    if (child != nullptr) require_known_names(*child);
  }
}

}  // namespace ferry::rollout::text::jinja
