// Drafts: what followed the longest earlier occurrence of a sequence's latest tokens, in its own text or in other texts.
#pragma once
#include <algorithm>
#include <cstdint>

#include "records.h"

constexpr int64_t MAX_MATCH = 16;  // tokens of a match, which are compared

// The last `length` tokens of a sequence are those of a text before its token `next`.
struct Match {
  int64_t length, next;
  const Text* text;
};

// Replaces `best` by the longest match in `text` of the tokens before `end`, of which `known` may be read, if it is longer and
// at least `least` tokens long. Of equally long ones the latest. A negative token separates texts: nothing follows it.
static void search(const Text& text, const int32_t* end, int64_t known, int64_t least, Match& best) {
  int64_t wanted = std::max(least, best.length + 1);
  for (int64_t next = text.length - 1; next >= wanted && wanted <= known; next--) {
    const int32_t* before = text.tokens + next;
    if (before[-1] != end[-1] || before[-wanted] != end[-wanted] || *before < 0) continue;
    int64_t length = 1;
    while (length < std::min(known, next) && before[-length - 1] == end[-length - 1]) length++;
    if (length < wanted) continue;
    best = {length, next, &text};
    wanted = length + 1;
  }
}

// Writes a draft of row r to `draft`, and returns its length. The own text goes on with the draft itself, so that a sequence
// that repeats itself has long drafts. A draft ends before a token that ends the sequence: nothing is needed after it.
static int64_t find_draft(const Drafting& drafting, int64_t r, int32_t* draft) {
  const Text *first = drafting.texts + drafting.first_text[r], *own = drafting.texts + drafting.first_text[r + 1] - 1;
  const int64_t known = std::min(own->length, MAX_MATCH);
  Match best{0, 0, nullptr};
  for (const Text* text = drafting.from_own ? own : own - 1; text >= first; text--)
    search(*text, own->tokens + own->length, known, drafting.min_match, best);
  int64_t drafted = 0;
  for (; best.text && drafted < drafting.most[r]; drafted++) {
    const int64_t at = best.next + drafted, behind = at - best.text->length;
    if (behind >= 0 && best.text != own) break;
    const int32_t token = behind < 0 ? best.text->tokens[at] : draft[behind];
    if (token < 0 || token >= drafting.vocabulary) break;
    if (std::find(drafting.stop_ids, drafting.stop_ids + drafting.num_stop_ids, token) != drafting.stop_ids + drafting.num_stop_ids) break;
    draft[drafted] = token;
  }
  return drafted;
}
