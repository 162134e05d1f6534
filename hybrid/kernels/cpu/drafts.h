// Drafts: what followed the longest earlier occurrence of a sequence's latest tokens, in its own text or in other texts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "records.h"

constexpr int64_t MOST_MATCH = 16;    // tokens of a match, which are compared
constexpr int64_t SEARCH_BLOCK = 64;  // positions that are looked at together

// What a drafted token may be: in the vocabulary, and not one that ends the sequence, because nothing is needed after it.
struct Draftable {
  int64_t vocabulary;
  const int64_t* stop_ids;
  int64_t num_stop_ids;

  bool operator()(int32_t token) const {
    return token >= 0 && token < vocabulary && std::find(stop_ids, stop_ids + num_stop_ids, token) == stop_ids + num_stop_ids;
  }
};

// The last `length` tokens of a sequence are those of a text before its token `next`.
struct Match {
  int64_t length, next;
  const Text* text;
};

// Whether a match of at least `wanted` tokens may end before one of the positions [from, from + SEARCH_BLOCK) of a text.
static inline bool may_match(const int32_t* tokens, int64_t from, const int32_t* end, int64_t wanted) {
  const int32_t *last = tokens + from - 1, *first = tokens + from - wanted;
  uint32_t any = 0;
  for (int64_t i = 0; i < SEARCH_BLOCK; i++) any |= (last[i] == end[-1]) & (first[i] == end[-wanted]);
  return any;
}

// Replaces `best` by the longest match in `text` of the tokens before `end`, of which `known` may be read, if it is longer and
// at least `least` tokens long. Of equally long ones the latest. A negative token separates texts: nothing follows it.
static void search(const Text& text, const int32_t* end, int64_t known, int64_t least, Match& best) {
  int64_t wanted = std::max(least, best.length + 1), next = text.length - 1;
  while (wanted <= known && next >= wanted) {
    const int64_t from = next - SEARCH_BLOCK + 1;
    if (from >= wanted && !may_match(text.tokens, from, end, wanted)) {
      next = from - 1;
      continue;
    }
    for (const int64_t stop = std::max(from, wanted); next >= stop && wanted <= known; next--) {
      const int32_t* before = text.tokens + next;
      if (before[-1] != end[-1] || before[-wanted] != end[-wanted] || *before < 0) continue;
      int64_t length = 1;
      while (length < std::min(known, next) && before[-length - 1] == end[-length - 1]) length++;
      if (length < wanted) continue;
      best = {length, next, &text};
      wanted = length + 1;
    }
  }
}

// At most `most` tokens that may follow those of row r, the last one of `texts`, into `draft`; returns their number. The own
// text goes on with the draft itself, so that a sequence that repeats itself has long drafts.
static int64_t find_draft(const Drafting& drafting, const Text* texts, int64_t count, int64_t most, const Draftable& draftable, int32_t* draft) {
  const Text& own = texts[count - 1];
  const int64_t known = std::min(own.length, MOST_MATCH);
  Match best{0, 0, nullptr};
  for (int64_t i = count - (drafting.from_own ? 1 : 2); i >= 0 && most > 0; i--)
    search(texts[i], own.tokens + own.length, known, drafting.least_match, best);
  if (!best.text) return 0;
  int64_t drafted = 0;
  for (; drafted < most; drafted++) {
    const int64_t at = best.next + drafted, behind = at - best.text->length;
    if (behind >= 0 && best.text != &own) break;
    const int32_t token = behind < 0 ? best.text->tokens[at] : draft[behind];
    if (!draftable(token)) break;
    draft[drafted] = token;
  }
  return drafted;
}
