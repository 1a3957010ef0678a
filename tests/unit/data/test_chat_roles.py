from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.data.chat import ROLES, ChatTemplate, Message
from spile.data.tokens import Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.sample import Role
from tiny_tokenizers import CHATML

LLAMA = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start|>' + message['role'] + '<|end|>\\n\\n' "
    "+ message['content'] | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}{%- endfor %}"
)
THINKING = (  # looks into what is said, as Qwen3's does: thoughts of earlier turns are dropped
    "{%- for message in messages %}{%- set content = message['content'] %}"
    "{%- if '</think>' in content and not loop.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
)
MIRRORED = "{%- for message in messages %}{{- message['content'] | reverse }}{%- endfor %}"
DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{%- endif %}" + CHATML
)

contents = st.text(alphabet="ab user\n<|im_start|>系{}%", max_size=20)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def parts_said(chat: ChatTemplate, messages: list[Message]) -> list[tuple[Role, str]] | None:
    rendered = chat.render(messages)
    return None if rendered.spans is None else [(s.role, rendered.text[s.start : s.stop]) for s in rendered.spans]


@pytest.mark.parametrize(("source", "trims"), [(CHATML, False), (DEFAULT_SYSTEM, False), (LLAMA, True)])
@settings(deadline=None)  # the first example imports the renderer
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=5))
def test_spans_are_exactly_the_contents(source: str, trims: bool, turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    found = parts_said(template(source), messages)
    words = [(role, content.strip() if trims else content) for role, content in turns]
    assert found == [(ROLES[role], content) for role, content in words if role in ROLES and content]


def test_a_message_that_says_what_a_header_says() -> None:
    messages = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "user\nassistant"}]
    assert parts_said(template(CHATML), messages) == [(Role.USER, "user"), (Role.ASSISTANT, "user\nassistant")]
    assert parts_said(template(MISTRAL), messages) == [(Role.USER, "user"), (Role.ASSISTANT, "user\nassistant")]


def test_the_answers_header_comes_only_after_a_users_turn() -> None:
    chat = template(CHATML)
    assert chat.render([{"role": "user", "content": "a"}]).text.endswith("<|im_start|>assistant\n")
    ended = chat.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert ended.text.endswith("b<|im_end|>\n")


def test_a_template_that_drops_part_of_a_content_leaves_that_part_out() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>hm</think>\nfirst"},
        {"role": "user", "content": "r"},
    ]
    rendered = template(THINKING).render(messages)
    assert "hm" not in rendered.text
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>hm</think>last"}]
    assert parts_said(template(THINKING), plain) == [(Role.USER, "q"), (Role.ASSISTANT, "<think>hm</think>last")]


def test_a_template_that_changes_its_messages_has_no_spans() -> None:
    rendered = template(MIRRORED).render([{"role": "user", "content": "abc"}])
    assert rendered.text == "cba"
    assert rendered.spans is None


def test_contents_in_parts() -> None:
    source = (
        "{%- for message in messages %}{{- '<' + message['role'] + '>' }}"
        "{%- for part in message['content'] %}{{- part['text'] + ';' }}{%- endfor %}{%- endfor %}"
    )
    parts: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parts_said(template(source), [{"role": "user", "content": parts}]) == [
        (Role.USER, "one"),
        (Role.USER, "two"),
    ]


def test_messages_with_more_fields() -> None:
    messages = [{"role": "user", "content": "hi", "name": "ann"}, {"role": "assistant", "content": "yes"}]
    assert parts_said(template(CHATML), messages) == [(Role.USER, "hi"), (Role.ASSISTANT, "yes")]


def test_what_the_template_refuses_is_the_datas_fault() -> None:
    with pytest.raises(DataError, match="refuses these messages: found only user and assistant roles"):
        template(MISTRAL).render([{"role": "system", "content": "x"}])
    with pytest.raises(ModelError, match="chat template cannot be read"):
        template("{% for %}").render([{"role": "user", "content": "x"}])


DIALECT = (
    "{{- bos_token }}{%- set ns = namespace(n=0) %}{% for message in messages %}\n"
    "  {% if message['role'] == 'tool' %}{% continue %}{% endif %}\n"
    "{% generation %}<{{ message['role'] }}>{% endgeneration %}{%- set ns.n = ns.n + 1 %}"
    "{{- message | tojson }} {{ {'b': 'é<', 'a': [1]} | tojson(indent=2) }} {{ ns.n }}\n"
    "    {%- if tools %}tools{% endif %}{% endfor %}{{ eos_token if not add_generation_prompt }}"
)


@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM, LLAMA, THINKING, MIRRORED, DIALECT])
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant"], ["tool", "user"]):
        messages = [{"role": role, "content": f" {role} <b>\n</think> 'x' "} for role in roles]
        theirs, _ = render_jinja_template(
            [messages],
            chat_template=source,
            add_generation_prompt=roles[-1] != "assistant",
            bos_token="<s>",
            eos_token="</s>",
        )
        assert template(source).render(messages).text == theirs[0]


def test_a_prompt_does_not_depend_on_the_day() -> None:
    text = template("{{ strftime_now('%d %b %Y') }}").render([{"role": "user", "content": "x"}]).text
    assert text == "26 Jul 2024"


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ strftime_now.__globals__.x }}"):
        with pytest.raises(DataError, match="refuses these messages"):
            template(attack).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError: maximum recursion"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_a_template_that_fails_is_reported_in_one_line(source: str, found: str) -> None:
    with pytest.raises(DataError, match=f"the model's chat template fails on these messages: found {found}") as error:
        template(source).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_the_message_of_a_template_is_short() -> None:
    with pytest.raises(DataError, match="refuses these messages: found xxx") as error:
        template("{{ raise_exception('x' * 9000000) }}").render([{"role": "user", "content": "x"}])
    assert len(str(error.value)) < 1000
    with pytest.raises(ModelError, match="cannot be read: found Encountered unknown tag 'xxx") as unknown:
        template("{% " + "x" * 9_000 + " %}").render([{"role": "user", "content": "x"}])
    assert len(str(unknown.value)) < 1000


def test_a_template_cannot_draw_random_numbers() -> None:
    with pytest.raises(ModelError, match="No filter named 'random'"):
        template("{{ range(9) | random }}").render([{"role": "user", "content": "x"}])


def test_what_long_chats_need_is_not_refused() -> None:
    """A thousand messages of two thousand letters, each cut, joined and replaced in as templates do."""
    source = (
        "{% for m in messages %}{% set c = m['content'] | trim %}{{ '<' ~ m.role ~ '>' + c.replace('a', 'bb')[1:] }}"
        "{{ c.split('a') | join(', ') | length }}{{ m | tojson | length }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a b" * 700}] * 1000
    assert len(template(source).render(chat).text) > 2_000_000


def test_joining_in_a_template_is_as_in_jinja() -> None:
    source = "{% macro m(a) %}{{ a ~ '!' }}{% endmacro %}{{ 'a' ~ 1 ~ none }}{{ m('hi' ~ 'x') | upper }}{{ [1] + [2] }}"
    assert template(source).render([{"role": "user", "content": "x"}]).text == "a1NoneHIX![1, 2]"


def test_which_templates_know_no_system() -> None:
    assert template(MISTRAL).rejects_system()
    assert template(
        "{%- for m in messages if m['role'] != 'system' %}{{- m['content'] }}{%- endfor %}"
    ).rejects_system()
    assert not template(CHATML).rejects_system()


def test_roles_token_by_token(chatml: Tokenizer) -> None:
    chat = ChatTemplate.of(chatml)
    assert chat is not None
    rendered = chat.render([{"role": "system", "content": "the fox"}, {"role": "user", "content": "漢 dog"}])
    assert rendered.spans is not None
    encoded = chatml.encode([rendered.text], add_special=False, spans=[rendered.spans])[0]
    pieces = [
        (chatml.backend.id_to_token(token), role)
        for token, role in zip(encoded.tokens.tolist(), encoded.roles, strict=True)
    ]
    assert pieces[0] == ("<|im_start|>", Role.SPECIAL | Role.FIRST)
    by_role = {
        role: chatml.decode(encoded.tokens[encoded.roles == role].tolist())
        for role in (Role.SYSTEM, Role.USER, Role.SPECIAL, 0)
    }
    assert by_role[Role.SYSTEM] == "the fox"
    assert by_role[Role.USER] == "漢 dog"
    assert by_role[Role.SPECIAL] == "<|im_end|><|im_start|><|im_end|><|im_start|>"
    assert by_role[0] == "system\n\nuser\n\nassistant\n"
