"""Completion scripts for bash, zsh and fish, which hold all commands and options: completing starts no Python."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit_command.declared import Option, declared
from shardkit_command.table import COMMANDS, GROUPS, SHELLS, Command, commands_of

USAGE = """usage: shardkit completion bash|zsh|fish

Print a script that completes commands, options and their values.

  bash    shardkit completion bash > ~/.local/share/bash-completion/completions/shardkit
  zsh     shardkit completion zsh > ~/.zfunc/_shardkit    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish    shardkit completion fish > ~/.config/fish/completions/shardkit.fish"""

_COMMON = ("--help", "--debug")


def script(shell: str) -> str:
    """The completion script of a shell, one of "bash", "zsh" and "fish"."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _all() -> Iterator[tuple[str, str, Command]]:
    """The group, the name under it and the command, of every command."""
    for command in COMMANDS:
        yield "", command.name, command
    for group, (commands, _) in GROUPS.items():
        for command in commands:
            yield group, command.name, command


def _options(command: Command) -> list[Option]:
    return [option for option in declared(command.module, command.name).options if option.words]


def _top() -> list[tuple[str, str]]:
    rows = [(command.name, command.line) for command in COMMANDS]
    rows += [(group, line) for group, (_, line) in GROUPS.items()]
    return [*rows, ("completion", "print a completion script")]


def _bash() -> str:
    groups = "|".join(GROUPS)
    lines = [
        "# bash completion of shardkit",
        "_shardkit() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words= values=',
        f'    [[ "$command" =~ ^({groups})$ && $COMP_CWORD -gt 2 ]] && command="$command ${{COMP_WORDS[2]}}"',
        "    if (( COMP_CWORD == 1 )); then",
        f'        words="{" ".join(name for name, _ in _top())} --help --version"',
        "    else",
        '        case "$command" in',
        f'        completion) words="{" ".join(SHELLS)}" ;;',
    ]
    for group, (commands, _) in GROUPS.items():
        lines.append(f'        {group}) words="{" ".join(command.name for command in commands)} --help" ;;')
    for group, name, command in _all():
        options = _options(command)
        words = " ".join([word for option in options for word in option.words] + [*_COMMON])
        lines += [f'        "{f"{group} {name}".strip()}")', f'            words="{words}"']
        choices = [option for option in options if option.choices]
        if choices:
            lines.append('            case "$previous" in')
            for option in choices:
                lines.append(f'            {"|".join(option.words)}) values="{" ".join(option.choices)}" ;;')
            lines.append("            esac")
        lines.append("            ;;")
    lines += [
        "        esac",
        "    fi",
        '    [[ "$current" != -* && $COMP_CWORD -gt 2 ]] && words=',
        '    [[ -n "$values" ]] && words="$values"',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _shardkit shardkit",
    ]
    return "\n".join(lines)


def _zsh() -> str:
    lines = ["#compdef shardkit", "", "_shardkit() {", "    local -a commands", "    local command=$words[2]"]
    lines += [f"    if (( CURRENT == 2 )); then {_described(_top())}; return; fi"]
    for group in GROUPS:
        rows = [(command.name, command.line) for command in commands_of(group)]
        lines += [f"    if [[ $command == {group} ]]; then"]
        lines += [f"        if (( CURRENT == 3 )); then {_described(rows)}; return; fi"]
        lines += ['        command="$command $words[3]"; shift words; (( CURRENT-- ))', "    fi"]
    lines += ["    shift words; (( CURRENT-- ))", '    case "$command" in']
    lines += [f"    completion) _values shell {' '.join(SHELLS)} ;;"]
    for group, name, command in _all():
        lines.append(f'    "{f"{group} {name}".strip()}") _arguments \\')
        for option in _options(command):
            for word in option.words:
                lines.append(f"        {_quoted(_of_zsh(word, option))} \\")
        lines += ["        '--help[show the help]' '--debug[show the traceback of an error]' '*:file:_files' ;;"]
    return "\n".join([*lines, "    esac", "}", "", '_shardkit "$@"'])


def _of_zsh(word: str, option: Option) -> str:
    text = _first(option).replace("[", "(").replace("]", ")").replace(":", ",")
    if not option.value:
        return f"{word}[{text}]"
    action = f"({' '.join(option.choices)})" if option.choices else "_files" if "PATH" in option.value else " "
    return f"{word}[{text}]:{option.name}:{action}"


def _described(rows: list[tuple[str, str]]) -> str:
    listed = " ".join(_quoted(f"{name}:{line}") for name, line in rows)
    return f"commands=({listed}); _describe command commands"


def _fish() -> str:
    lines = ["# fish completion of shardkit", "complete -c shardkit -n __fish_use_subcommand -f"]
    for name, line in _top():
        lines.append(f"complete -c shardkit -n __fish_use_subcommand -a {name} -d {_quoted(line)}")
    lines += [f"complete -c shardkit -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'"]
    for group, (commands, _) in GROUPS.items():
        names = " ".join(command.name for command in commands)
        unnamed = f"__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {names}"
        for command in commands:
            lines.append(f"complete -c shardkit -n '{unnamed}' -f -a {command.name} -d {_quoted(command.line)}")
    for group, name, command in _all():
        seen = f"__fish_seen_subcommand_from {name}"
        seen = f"__fish_seen_subcommand_from {group}; and {seen}" if group else seen
        for option in _options(command):
            words = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in option.words)
            given = f" -r -f -a '{' '.join(option.choices)}'" if option.choices else " -r" if option.value else ""
            lines.append(f"complete -c shardkit -n '{seen}' {words}{given} -d {_quoted(_first(option))}")
    return "\n".join(lines)


def _first(option: Option) -> str:
    """The first sentence of an option's text, on one line."""
    return " ".join(option.text.replace("`", "").split()).split(". ")[0].split("; ")[0].rstrip(".")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "") + "'"
