"""The order of the manual's pages. What stands in no list here comes last in its section, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Sections are the tabs above a page; a name ends in / where all pages of a folder belong here.
SECTIONS: Mapping[str, list[str]] = {
    "Start": ["index.md", "start.md", "one_page.md", "what_it_does.md"],
    "Learn": ["learn/"],
    "How to": [
        "howto/test_a_collective.md",
        "howto/prove_for_all_inputs.md",
        "howto/prove_as_compiled.md",
        "howto/kernels_of_remote_copies.md",
        "howto/training_script.md",
        "howto/choose_a_plan.md",
        "howto/choose_collectives.md",
        "howto/choose_a_schedule.md",
        "howto/bring_a_model.md",
        "howto/losses.md",
        "howto/freeze_a_part.md",
        "howto/change_by_step.md",
        "howto/ema.md",
        "howto/graphs.md",
        "howto/pass_a_state.md",
        "howto/whole_matrices.md",
        "howto/diloco.md",
        "howto/split_a_layer.md",
        "howto/run_a_pipeline.md",
        "howto/from_jit.md",
        "howto/from_pmap.md",
        "howto/words.md",
        "howto/many_processes.md",
        "howto/which_engine.md",
        "howto/faults.md",
        "howto/restart_by_itself.md",
        "howto/silent_corruption.md",
        "howto/resume_elsewhere.md",
        "howto/benchmark_my_mesh.md",
        "howto/compile_for_absent_chips.md",
        "howto/add_a_strategy.md",
        "howto/add_a_schedule.md",
        "howto/add_a_rule.md",
        "howto/add_a_chip.md",
        "howto/",
    ],
    "Understand": [
        "understand/the_seam.md",
        "understand/means_and_weights.md",
        "understand/why_not_pmean.md",
        "understand/varying_types.md",
        "understand/keys.md",
        "understand/layouts.md",
        "understand/how_it_is_proved.md",
        "understand/bets.md",
        "corpus.md",
        "understand/",
        "proved.md",
        "proved_f.md",
        "papers.md",
    ],
    "Symptoms": ["symptoms.md"],
    "Examples": ["examples.md"],
    "Reference": ["reference/index.md", "reference/commands.md", "reference/"],
    "Benchmarks": ["benchmarks/index.md", "benchmarks/"],
    "Project": ["contributing.md", "tests.md", "changelog.md"],
}

# Pages that name everything and explain nothing: a search finds them last.
LISTS = frozenset({"proved.md", "proved_f.md", "papers.md", "changelog.md", "tests.md"})


def arrange(pages: Iterable[str], reference: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The navigation over those pages that are there.

    Args:
        pages: paths of the pages below docs/.
        reference: pages of the reference, in their order.

    Returns:
        What `nav` of mkdocs.yml would hold; the title of a page is its first heading.

    Raises:
        ValueError: a page is in no section.
    """
    remaining = sorted(set(pages))
    sections: list[dict[str, Any]] = []
    for section, names in SECTIONS.items():
        if section == "Reference":
            names = [*reference, *names]
        section_pages: list[str] = []
        for name in names:
            for page in list(remaining):
                if page == name or (name.endswith("/") and page.startswith(name)):
                    section_pages.append(page)
                    remaining.remove(page)
        if len(section_pages) == 1:
            sections.append({section: section_pages[0]})
        elif section_pages:
            sections.append({section: section_pages})
    if remaining:
        raise ValueError(
            f"the pages {', '.join(remaining)} are in no section. Name them in docs/generate/navigation.py."
        )
    return sections


def title(text: str) -> str:
    """The first heading of a page, without its markup."""
    heading = re.search(r"^# (.+)$", text, re.M)
    if heading is None:
        return ""
    return heading[1].replace("`", "")
