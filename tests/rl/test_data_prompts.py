from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl.data.arithmetic import Arithmetic
from rl.data.order import Order
from rl.data.problem import Message, Problem
from rl.data.prompts import Prompts, encode
from rl.errors import DataError

WORDS = ["<s>", "</s>", "<user>", "<assistant>", *(f"w{i}" for i in range(30))]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} <{{ m.role }}> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


def word_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Llama's habits: text is given a beginning-of-sequence token, and the chat template writes one too."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


class Lengths:
    """Problems with prompts of 1, 2, ... words."""

    def __init__(self, count: int, held_out: int = 0):
        self.training_count = count
        self.held_out = tuple(self._problem(1000 + n, n) for n in range(1, held_out + 1))
        self._order = Order(count, seed=0)

    @staticmethod
    def _problem(number: int, words: int) -> Problem:
        return Problem(f"id{number}", " ".join(f"w{i}" for i in range(words)), "", "lengths")

    def training(self, position: int) -> Problem:
        index = self._order[position]
        return self._problem(index, index + 1)

    def describe(self) -> dict:
        return {"source": "lengths"}


def words(ids: tuple[int, ...]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_plain_text_gets_one_beginning_token():
    assert words(encode(Problem("a", "w1 w2", "", "s"), word_tokenizer())) == ["<s>", "w1", "w2"]


def test_a_chat_gets_the_templates_tokens_and_no_second_beginning():
    problem = Problem(
        "a", (Message("user", "w1"), Message("assistant", "w2"), Message("user", "w3")), "", "s"
    )
    text = " ".join(words(encode(problem, word_tokenizer())))
    assert text == "<s> <user> w1 </s> <assistant> w2 </s> <user> w3 </s> <assistant>"


def test_a_chat_equals_transformers_own_tokenised_template():
    chat = (Message("user", "w5 w6"),)
    tokenizer = word_tokenizer()
    own = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w5 w6"}], add_generation_prompt=True, return_dict=False
    )
    assert list(encode(Problem("a", chat, "", "s"), tokenizer)) == own


def test_text_that_brings_its_own_beginning_is_refused():
    with pytest.raises(DataError, match=r"'a'.*two beginning-of-sequence"):
        encode(Problem("a", "<s> w1", "", "s"), word_tokenizer())


def test_a_chat_needs_a_template_and_a_prompt_needs_tokens():
    with pytest.raises(DataError, match=r"'a' is a chat.*no chat template"):
        encode(Problem("a", (Message("user", "w1"),), "", "s"), word_tokenizer(None))
    with pytest.raises(DataError, match=r"'b' has a prompt without tokens"):
        encode(Problem("b", "", "", "s"), Arithmetic(10, True, 0, 0).tokenizer())


def test_overlong_error_names_problem_tokens_and_limit():
    prompts = Prompts(Lengths(5), word_tokenizer(), limit=6)  # five words and the beginning
    assert prompts.describe()["longest_prompt"] == 6
    with pytest.raises(DataError, match=r"'id4' of lengths has a prompt of 6 tokens, and 5 is the limit"):
        Prompts(Lengths(5), word_tokenizer(), limit=5)
    with pytest.raises(DataError, match=r"'id1003' of lengths has a prompt of 4 tokens"):
        Prompts(Lengths(2, held_out=3), word_tokenizer(), limit=3)


def test_overlong_prompts_are_dropped_whole_and_counted():
    source = Lengths(10, held_out=6)
    prompts = Prompts(source, word_tokenizer(), limit=5, overlong="drop")
    assert prompts.training_count == 4
    assert [len(prompt.token_ids) for prompt in prompts.held_out] == [2, 3, 4, 5]
    about = prompts.describe()
    assert (about["overlong_training"], about["overlong_held_out"]) == (6, 2)
    assert (about["longest_prompt"], about["prompt_limit"], about["source"]) == (5, 5, "lengths")
    for epoch in range(3):
        drawn = [prompts.training(4 * epoch + offset) for offset in range(4)]
        assert sorted(len(prompt.token_ids) for prompt in drawn) == [2, 3, 4, 5]
        # The order is the source's own, with gaps closed.
        whole = [source.training(10 * epoch + offset) for offset in range(10)]
        assert [p.problem for p in drawn] == [p for p in whole if len(p.prompt.split()) <= 4]
        assert [p.position for p in drawn] == list(range(4 * epoch, 4 * epoch + 4))
    with pytest.raises(DataError, match="none of the 10 training prompts fits into 1 tokens"):
        Prompts(source, word_tokenizer(), limit=1, overlong="drop")


def test_positions_are_the_sources_when_all_prompts_fit():
    source = Arithmetic(bound=20, reversed_digits=True, held_out=7, seed=5)
    prompts = Prompts(source, source.tokenizer(), limit=8)
    for position in (0, 3, 399, 1234):
        prompt = prompts.training(position)
        assert prompt.problem == source.training(position)
        assert source.tokenizer().decode(list(prompt.token_ids)) == prompt.problem.prompt
    assert [prompt.problem for prompt in prompts.held_out] == list(source.held_out)
    with pytest.raises(ValueError, match="position=-1"):
        prompts.training(-1)
