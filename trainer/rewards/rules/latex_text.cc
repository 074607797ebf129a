#include "trainer/rewards/rules/latex_text.h"

#include <algorithm>
#include <iterator>

namespace ferry::trainer::latex {
namespace {

using code_points::is_letter;
using code_points::is_space;
using code_points::Text;
using code_points::View;

struct LatexCommand {
  View name{};
  View text{};
};
// Others are nothing, and what stands in braces behind them stays.
constexpr LatexCommand kLatexCommands[] = {
    {U"alpha", U"α"},       {U"beta", U"β"},        {U"gamma", U"γ"},     {U"delta", U"δ"},
    {U"epsilon", U"ϵ"},     {U"varepsilon", U"ε"},  {U"zeta", U"ζ"},      {U"eta", U"η"},
    {U"theta", U"θ"},       {U"iota", U"ι"},        {U"kappa", U"κ"},     {U"lambda", U"λ"},
    {U"mu", U"μ"},          {U"nu", U"ν"},          {U"xi", U"ξ"},        {U"rho", U"ρ"},
    {U"sigma", U"σ"},       {U"tau", U"τ"},         {U"phi", U"ϕ"},       {U"varphi", U"φ"},
    {U"chi", U"χ"},         {U"psi", U"ψ"},         {U"omega", U"ω"},     {U"Gamma", U"Γ"},
    {U"Delta", U"Δ"},       {U"Theta", U"Θ"},       {U"Lambda", U"Λ"},    {U"Xi", U"Ξ"},
    {U"Pi", U"Π"},          {U"Sigma", U"Σ"},       {U"Phi", U"Φ"},       {U"Psi", U"Ψ"},
    {U"Omega", U"Ω"},       {U"pi", U"π"},          {U"infty", U"∞"},     {U"cup", U"∪"},
    {U"cap", U"∩"},         {U"cdot", U"·"},        {U"times", U"×"},     {U"div", U"÷"},
    {U"pm", U"±"},          {U"mp", U"∓"},          {U"le", U"≤"},        {U"leq", U"≤"},
    {U"ge", U"≥"},          {U"geq", U"≥"},         {U"neq", U"≠"},       {U"approx", U"≈"},
    {U"equiv", U"≡"},       {U"sim", U"∼"},         {U"simeq", U"≃"},     {U"cong", U"≅"},
    {U"propto", U"∝"},      {U"angle", U"∠"},       {U"circ", U"∘"},      {U"perp", U"⊥"},
    {U"parallel", U"∥"},    {U"square", U"□"},      {U"emptyset", U"∅"},  {U"varnothing", U"∅"},
    {U"in", U"∈"},          {U"notin", U"∉"},       {U"subset", U"⊂"},    {U"subseteq", U"⊆"},
    {U"to", U"→"},          {U"rightarrow", U"→"},  {U"leftarrow", U"←"}, {U"Rightarrow", U"⇒"},
    {U"cdots", U"⋯"},       {U"ldots", U"…"},       {U"dots", U"…"},      {U"vdots", U"⋮"},
    {U"sin", U"sin"},       {U"cos", U"cos"},       {U"tan", U"tan"},     {U"arcsin", U"arcsin"},
    {U"arccos", U"arccos"}, {U"arctan", U"arctan"}, {U"sinh", U"sinh"},   {U"cosh", U"cosh"},
    {U"tanh", U"tanh"},     {U"log", U"log"},       {U"ln", U"ln"},       {U"exp", U"exp"},
    {U"max", U"max"},       {U"min", U"min"},       {U"lim", U"lim"},     {U"quad", U"  "},
    {U"qquad", U"    "},    {U"prime", U"'"},       {U"star", U"⋆"},      {U"ast", U"∗"},
    {U"bullet", U"∙"},      {U"setminus", U"∖"},    {U"wedge", U"∧"},     {U"vee", U"∨"},
    {U"forall", U"∀"},      {U"exists", U"∃"},      {U"sum", U"∑"},       {U"prod", U"∏"},
    {U"int", U"∫"},         {U"partial", U"∂"},     {U"nabla", U"∇"},     {U"ell", U"ℓ"},
    {U"mid", U"|"},         {U"vert", U"|"},        {U"Vert", U"‖"},      {U"lfloor", U"⌊"},
    {U"rfloor", U"⌋"},      {U"lceil", U"⌈"},       {U"rceil", U"⌉"},     {U"langle", U"⟨"},
    {U"rangle", U"⟩"},      {U"lbrace", U"{"},      {U"rbrace", U"}"},    {U"backslash", U"\\"},
    {U",", U" "},           {U";", U" "},           {U":", U" "},         {U" ", U" "},
    {U"\\", U"\n"},         {U"{", U"{"},           {U"}", U"}"},         {U"_", U"_"},
    {U"&", U"&"},           {U"#", U"#"},           {U"%", U"%"},         {U"$", U"$"},
};
constexpr View kFractions[] = {U"frac", U"nicefrac", U"textfrac"};
constexpr View kDiscarded[] = {U"mbox", U"hspace"};  // with their arguments

struct RootOfNothing {};

class LatexReader {
 public:
  explicit LatexReader(View latex) : rest_(latex) {}

  // Reads to the end, or to the brace that closes a group; one that closes nothing is nothing.
  Text text(bool in_group = false) {
    Text result;
    while (!rest_.empty()) {
      const auto c = rest_[0];
      if (c == U'\\') {
        result += command();
        continue;
      }
      rest_.remove_prefix(1);
      if (c == U'{')
        result += text(true);
      else if (c == U'}' && in_group)
        return result;
      else if (c == U'&')
        result += U"   ";
      else if (c != U'}' && c != U'$')
        result += c == U'~' ? U'\u00a0' : c;
    }
    return result;
  }

 private:
  void skip_spaces() {
    while (!rest_.empty() && is_space(rest_[0])) rest_.remove_prefix(1);
  }

  View name() {
    rest_.remove_prefix(1);
    std::size_t size = 0;
    while (size < rest_.size() && is_letter(rest_[size])) ++size;
    const auto found = rest_.substr(0, std::max<std::size_t>(size, 1));
    rest_.remove_prefix(found.size());
    if (size > 0) skip_spaces();
    return found;
  }

  Text command() {
    const auto found = name();
    if (std::ranges::find(kFractions, found) != std::end(kFractions)) {
      const auto behind = rest_;
      const auto above = argument();
      const auto below = above ? argument() : std::nullopt;
      if (below) return *above + U"/" + *below;
      rest_ = behind;
      return U"%s/%s";
    }
    if (found == U"sqrt") {
      if (rest_.starts_with(U'['))
        rest_.remove_prefix(std::min(rest_.size(), rest_.find(U']')) + 1);
      const auto inner = argument();
      if (!inner) throw RootOfNothing();
      return U"√(" + *inner + U")";
    }
    if (std::ranges::find(kDiscarded, found) != std::end(kDiscarded)) {
      (void)argument();
      return {};
    }
    return symbol(found);
  }

  static Text symbol(View name) {
    const auto* const known = std::ranges::find(kLatexCommands, name, &LatexCommand::name);
    return known == std::end(kLatexCommands) ? Text() : Text(known->text);
  }

  // A group, a character, or a command without arguments of its own.
  std::optional<Text> argument() {
    skip_spaces();
    if (rest_.empty() || rest_[0] == U'}') return std::nullopt;
    if (rest_[0] == U'\\') {
      const auto found = name();
      if (found == U"sqrt") throw RootOfNothing();
      return symbol(found);
    }
    const auto c = rest_[0];
    rest_.remove_prefix(1);
    return c == U'{' ? text(true) : Text(1, c);
  }

  View rest_;
};

}  // namespace

std::optional<Text> to_text(View latex) {
  constexpr auto kMostGroups = 100;
  if (std::ranges::count(latex, U'{') > kMostGroups) return std::nullopt;
  try {
    return LatexReader(latex).text();
  } catch (const RootOfNothing&) {
    return std::nullopt;
  }
}

}  // namespace ferry::trainer::latex
