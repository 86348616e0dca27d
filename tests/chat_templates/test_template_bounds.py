"""Hostile chat templates end at a bound: on texts, lists, numbers or steps."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_team import make_model
from tests.support.waiting import PATIENCE
from troupe.chat_templates import TemplateLimitError
from troupe.chat_templates.bounded import BoundedTemplate
from troupe.job import ModelSpec
from troupe.rpc.errors import InvalidArgument
from troupe.workflow.languages import load_language

MESSAGES = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]

# One expression or statement that would make a text, list or number without a bound.
GROWING = [
    "{{ 'x'|center(3000000000) }}",
    "{{ ['x']|map('center', 3000000000)|list }}",
    "{% filter center(3000000000) %}x{% endfilter %}",
    "{% set x | center(3000000000) %}x{% endset %}",
    "{{ 'x'|attr('center')(3000000000) }}",
    "{{ 'x'.center(3000000000) }}",
    "{{ ('x'|safe).center(3000000000) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ 'x'.rjust(3000000000) }}",
    "{{ 'x'.zfill(3000000000) }}",
    "{{ '\t'.expandtabs(3000000000) }}",
    "{{ 'x'|indent(3000000000, true) }}",
    "{{ 'x'|indent(width=3000000000, first=true) }}",
    "{{ [1]|batch(3000000000, 'x')|list }}",
    "{{ [1]|slice(3000000000, 'x')|list }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ {'a': [1]}|tojson(indent=3000000000) }}",
    "{{ [[[[1]]]]|tojson(indent='x' * 1000000) }}",
    "{{ [1, 2, 3, 4]|tojson(separators=['x' * 1000000, ':']) }}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**10 }}",
    "{{ 10**1000000000 }}",
    "{{ (10**300) * (10**300) }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ '%.1000000000f' % 3 }}",
    "{{ '%*d' % (1000000000, 3) }}",
    "{{ '%(a)1000000000s' % {'a': 'x'} }}",
    "{{ '%1000000000s'|format('x') }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:>{w}}'.format('x', w=1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 'x'}) }}",
    "{{ ('x' * 900000).join(['a'] * 1000) }}",
    "{{ {'a': 1, 'b': 2, 'c': 3}.keys()|join('x' * 900000) }}",
    "{{ ('a' * 10000).replace('', 'x' * 10000) }}",
    "{{ ('a' * 10000)|replace('a', 'x' * 10000) }}",
    "{{ ('<' * 500000)|e }}",
    "{{ (1).to_bytes(3000000000, 'big') }}",
    "{{ ('f' * 900000)|int(0, 16) }}",
    "{{ ['f' * 900000]|map('int', 0, 16)|list }}",
    "{{ 'x'.encode() * 3000000000 }}",
    "{{ 'x'.translate({120: 'xx'}) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 1000000) }}",
    "{% set b = 'x' * 1000000 %}{{ ''.join(([b] * 100000)|select) }}",
    "{% set b = 'x' * 1000000 %}{% for i in range(100000) %}{{ b }}{% endfor %}",
    "{% set b = 'x' * 1000000 %}{% for i in range(100000) %}{% set c = b[1:] %}{% endfor %}",
    "{% macro f() %}" + "x" * 100_000 + "{% endmacro %}"
    "{% for i in range(100000) %}{% set x = f() %}{% endfor %}",
]
# Doubles `ns.x` at each of 100 turns of a loop.
DOUBLING = [
    "ns.x ~ ns.x",
    "ns.x + ns.x",
    "ns.x * 2",
    "[ns.x, ns.x]",
    "(ns.x, ns.x)",
    "{'a': ns.x, 'b': ns.x}",
    "dict(a=ns.x, b=ns.x)",
    "[ns.x, ns.x]|join",
    "[ns.x]|list + [ns.x]",
    "'%s%s' % (ns.x, ns.x)",
    "'{0}{0}'.format(ns.x)",
    "ns.x.replace('x', 'xx')",
    "ns.x|replace('x', 'xx')",
    "namespace(a=ns.x, b=ns.x)",
]
RECURSIVE = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n-1) if n }}{{ f(n-1) if n }}{% endmacro %}{{ f(90) }}",
    "{% macro g() %}{{ caller() }}{% endmacro %}"
    "{% macro f() %}{% call g() %}{{ f() }}{% endcall %}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{% set ns = namespace(x=[]) %}"
    "{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if range(99999)|sum < 0 %}{% endfor %}",
    "{% for a in range(99999) %}{% if a not in range(99999)|list %}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{% if 1.5 in range(99999) %}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "{{ ('Ā' * 500000).strip('Ȁ' * 400000 ~ 'Ā') }}",
    "{{ ('Ā' * 500000).lstrip('Ȁ' * 400000 ~ 'Ā') }}",
    "{{ ('Ā' * 500000).rstrip('Ȁ' * 400000 ~ 'Ā') }}",
    "{{ ('Ā' * 500000)|trim('Ȁ' * 400000 ~ 'Ā') }}",
    "{{ ('Ā' * 500000)|trim(chars='Ȁ' * 400000 ~ 'Ā') }}",
    "{{ ('a' * 900000).rfind('ab' ~ 'a' * 150000) }}",
    "{{ ('a' * 900000).rindex('ab' ~ 'a' * 150000) }}",
    "{{ ('a' * 900000).rsplit('ab' ~ 'a' * 150000) }}",
    "{{ ('a' * 900000).rsplit(sep='ab' ~ 'a' * 150000) }}",
    "{{ ('a' * 900000).rpartition('ab' ~ 'a' * 150000) }}",
    "{% set x = ('f' * 900000)|int(0, 16) %}{% for a in range(99999) %}"
    "{% if x is divisibleby(3) %}{% endif %}{% set y = -x %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|select('in', range(9))|first %}"
    "{% endfor %}",
    "{% for a in range(99999) %}{% set x = dict.fromkeys(range(99999)) %}{% endfor %}",
    "{% set a = [[1]] * 9000 %}{% for i in range(99999) %}{% set x = a|sum(start=[]) %}"
    "{% endfor %}",
    "{% set a = 'x' * 1000000 %}{% for i in range(99999) %}{% if a.upper() == a %}{% endif %}"
    "{% endfor %}",
    "{% for a in range(99999) %}{% set x = cycler(*range(99999)) %}{% endfor %}",
    "{% set d = dict.fromkeys(range(99999)|list) %}"
    "{% for a in range(99999) %}{% set x = namespace(d) %}{% endfor %}",
    "{% set t = 'é ' * 500000 %}{% set n = namespace(x=[]) %}"
    "{% for a in range(99) %}{% set n.x = n.x + [t.split(' ')] %}{% endfor %}",
    "{% for a in range(99999) %}{{ 1|troupe_step(-10**9) }}{% endfor %}",
    "{% for a in range(99999) %}{{ 1|troupe_step('nan'|float) }}{% endfor %}",
    "{% set n = namespace() %}{% set n.a = n %}"
    "{{ ([n] * 9000)|map(attribute='a' ~ '.a' * 9000)|list }}",
]


@pytest.mark.parametrize(
    "text",
    [
        *GROWING,
        *RECURSIVE,
        *ENDLESS,
        *(
            f"{{% set ns = namespace(x='x') %}}{{% for i in range(100) %}}"
            f"{{% set ns.x = {how} %}}{{% endfor %}}{{{{ ns.x }}}}{{{{ ns.x == [ns.x] }}}}"
            for how in DOUBLING
        ),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{{ 1 }}" * 100_000,
        "x" * (1 << 20),
    ],
    ids=lambda text: text[:60],
)
def test_a_hostile_template_ends_by_a_bound(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateLimitError):
        BoundedTemplate(text).render(messages=MESSAGES)
    # KiB: the largest value has a million characters.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_work_is_bounded_by_the_conversation() -> None:
    """A template may walk through all earlier messages at each message of a long conversation."""
    text = (
        "{% for m in messages %}{% for n in messages[:loop.index0] %}"
        "{% if n.role == m.role %}{% endif %}{% endfor %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 400}] * 400
    assert BoundedTemplate(text).render(messages=messages) == "x" * 160_000


def test_a_template_is_unharmed_by_a_rendering_that_was_refused() -> None:
    template = BoundedTemplate("{{ 'x' * width }}")
    with pytest.raises(TemplateLimitError):
        template.render(width=10**9)
    assert template.render(width=3) == "xxx"


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_hostile_template_is_refused_when_its_model_is_loaded(tmp_path: Path, where: str) -> None:
    model = make_model(tmp_path / "model")
    hostile = "{{ 'x'|center(3000000000) }}"
    if where == "chat_template.jinja":
        (model / where).write_text(hostile)
    else:
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / where).read_text())
        (model / where).write_text(json.dumps({**config, "chat_template": hostile}))
    with pytest.raises(InvalidArgument) as caught:
        load_language(ModelSpec(path=str(model)), "policies.solver.model")
    problem = caught.value.to_problem()
    assert problem.kind == "chat_template"
    assert problem.field == "policies.solver.model.path"
    assert problem.value == str(model / where)
    assert "`center` would make 30000" in problem.message
    assert problem.remedy


def test_workflows_need_no_jinja_before_a_template_is_rendered() -> None:
    code = "import sys, troupe.workflow; assert 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
