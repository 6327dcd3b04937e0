//! Interfaces that may not change: wire formats, files, output for scripts, names and codes, each compared with a recorded fixture.
//!
//! A difference is a decision with a line in `docs/decisions/`. `NODEDOCK_RECORD=1` records the fixtures again instead of comparing:
//!
//! ```sh
//! NODEDOCK_RECORD=1 cargo xtask test --test frozen
//! ```

mod checkpoint;
mod codes;
mod commands;
mod metrics;
mod protocol;
mod scene;
mod text;

use std::path::PathBuf;

/// Lines of a difference that a failure shows.
const SHOWN_LINES_MAX: usize = 20;

/// A file of the recorded fixtures.
fn fixture(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/frozen/fixtures", name]
        .iter()
        .collect()
}

fn is_recording() -> bool {
    std::env::var_os("NODEDOCK_RECORD").is_some_and(|value| !value.is_empty())
}

/// Compares a text with its fixture, or records it.
#[track_caller]
fn assert_frozen(name: &str, found: &str) {
    let path = fixture(name);
    if is_recording() {
        return std::fs::write(&path, found).expect("write a fixture");
    }
    let recorded = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(
        found == recorded,
        "{name} differs from what is recorded:\n{}\nIf that is a decision, record it: NODEDOCK_RECORD=1 cargo xtask test --test frozen",
        difference(&recorded, found)
    );
}

/// The lines between the common beginning and the common end of two texts.
fn difference(recorded: &str, found: &str) -> String {
    let (old, new) = (
        Vec::from_iter(recorded.lines()),
        Vec::from_iter(found.lines()),
    );
    let same = old
        .iter()
        .zip(&new)
        .take_while(|(old, new)| old == new)
        .count();
    let (old, new) = (&old[same..], &new[same..]);
    let after = old
        .iter()
        .rev()
        .zip(new.iter().rev())
        .take_while(|(old, new)| old == new)
        .count();
    let side = |sign: &str, lines: &[&str]| -> Vec<String> {
        let differ = &lines[..lines.len() - after];
        differ
            .iter()
            .take(SHOWN_LINES_MAX)
            .map(|line| format!("{sign} {line}"))
            .collect()
    };
    format!(
        "from line {}:\n{}",
        same + 1,
        [side("-", old), side("+", new)].concat().join("\n")
    )
}

#[test]
fn difference_shows_only_differing_lines() {
    assert_eq!(
        difference("a\nb\nc\nd\n", "a\nx\nd\n"),
        "from line 2:\n- b\n- c\n+ x"
    );
    assert_eq!(difference("a\n", "a\na\n"), "from line 2:\n+ a");
}
