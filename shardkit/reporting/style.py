"""The look of the page: light, dark and on paper, from a telephone's width on. Contrasts are at least 4.5 to 1."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --quiet: #565d66; --paper: #ffffff; --box: #f5f6f8; --line: #d5d9df;
  --mark: #0072b2; --good: #1b6e3c; --bad: #a8320a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --quiet: #a9b0ba; --paper: #15181c; --box: #1e2228;
  --line: #3a414b; --mark: #56b4e9; --good: #6fce96; --bad: #ff9d6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 70ch; }
.quiet { color: var(--quiet); }
a { color: var(--mark); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0 0; padding: 0; list-style: none; }
code, pre, td, tbody th { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .8125rem; }
pre { padding: .75rem; background: var(--box); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .5rem; margin: 1rem 0; }
.figures > div { background: var(--box); border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .75rem; }
dt { color: var(--quiet); font-size: .8125rem; }
dd { margin: 0; font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.scroll { overflow-x: auto; margin: .35rem 0; border: 1px solid var(--line); border-radius: .4rem; }
.scroll:focus-visible, .picture:focus-visible, a:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-top: 1px solid var(--line); }
td, tbody th { white-space: nowrap; }
td.wide { white-space: normal; min-width: 22rem; }
thead { background: var(--box); }
thead th, thead td { border-top: 0; }
thead th { font-size: .8125rem; white-space: nowrap; }
tbody th { font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: inline-block; height: .8rem; min-width: 1px; background: var(--mark); vertical-align: middle; }
td.bars { width: 30%; min-width: 7rem; }
.findings { padding-left: 1.2rem; }
.findings li { margin: .75rem 0; max-width: 80ch; }
figure { margin: 1rem 0; }
figcaption { color: var(--quiet); font-size: .875rem; }
.picture { overflow-x: auto; margin: .35rem 0; }
@media print { :root { --ink: #000; --quiet: #444; --paper: #fff; --box: #fff; --line: #999; --mark: #0072b2;
  --good: #000; --bad: #000; } body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll, .picture { overflow: visible; }
  .picture svg { max-width: 100%; height: auto; } td, tbody th { white-space: normal; font-size: 7.5pt;
  padding: .15rem .3rem; }
  td.wide { min-width: 0; } td.bars { width: 10%; min-width: 2cm; } h2, h3, figcaption { break-after: avoid; }
  tr, .picture, .figures > div { break-inside: avoid; }
  .bar { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
