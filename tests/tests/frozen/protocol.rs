//! Messages, fields, numbers, types, enums and calls of every `.proto` file: the files without comments and layout.

use std::path::{Path, PathBuf};

use crate::assert_frozen;

/// A file as its statements, one a line.
fn statements(text: &str) -> String {
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let words: Vec<_> = code.flat_map(str::split_whitespace).collect();
    let one_line = words.join(" ");
    let lines = one_line
        .split_inclusive([';', '{', '}'])
        .map(str::trim)
        .filter(|line| !line.is_empty());
    lines.map(|line| format!("{line}\n")).collect()
}

pub(crate) fn files_below(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("read a directory").path())
        .collect();
    paths.sort();
    let below = |path: PathBuf| match path.is_dir() {
        true => files_below(&path, extension),
        false => Vec::from_iter(
            path.extension()
                .is_some_and(|found| found == extension)
                .then_some(path),
        ),
    };
    paths.into_iter().flat_map(below).collect()
}

#[test]
fn protocol_files_are_unchanged() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/proto");
    let files = files_below(&root, "proto");
    let rendered = files.iter().map(|file| {
        let text = std::fs::read_to_string(file).expect("read a protocol file");
        assert!(
            !text.contains("/*"),
            "{}: comments begin with // only",
            file.display()
        );
        let name = file
            .strip_prefix(&root)
            .expect("the file is below the root");
        format!("== {}\n{}", name.display(), statements(&text))
    });
    assert_frozen("protocol.txt", &rendered.collect::<String>());
}

#[test]
fn statements_ignore_comments_and_layout() {
    let (a, b) = (
        "message A {\n  // First.\n  string a = 1; // a\n}\n",
        "message A { string a\n= 1; }",
    );
    assert_eq!(statements(a), "message A {\nstring a = 1;\n}\n");
    assert_eq!(statements(a), statements(b));
    assert_ne!(statements(a), statements(&b.replace('1', "2")));
}
