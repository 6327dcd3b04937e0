//! Counts the methods of types.
//!
//! # The rule
//!
//! A type has at most `METHODS_MAX` methods: functions in its inherent `impl` blocks, associated functions included, over all files of its
//! crate. Those of traits do not count, nor do those that a macro writes. Code of tests counts as any other.
//!
//! Given the path of a crate's root and a function that reads a file; returns the types with too many. No IO of its own.

use std::collections::BTreeMap;

use anyhow::Result;

use super::modules::{Code, Modules, Read, shown};

/// Methods of a type. A type with more has several responsibilities: each is a type of its own, with its own state.
pub(super) const METHODS_MAX: usize = 40;

/// Returns the types of a crate that have too many methods.
pub(super) fn crowded(root: &str, read: Read<'_>) -> Result<Vec<String>> {
    let modules = Modules::read(root, read, Code::All)?;
    let mut counts = BTreeMap::new();
    for (module, found) in modules.iter() {
        for (path, methods) in &found.methods {
            *counts.entry(modules.declaring(module, path)).or_insert(0) += methods;
        }
    }
    let crowded = counts.into_iter().filter(|(_, count)| *count > METHODS_MAX);
    let shown = crowded
        .map(|((module, name), count)| format!("{root}: {}::{name} has {count}", shown(&module)));
    Ok(shown.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, String)]) -> Vec<String> {
        let read = |path: &str| {
            let file = files
                .iter()
                .find(|(name, _)| path == format!("a/src/{name}"));
            Ok(file.map(|(_, text)| text.clone()))
        };
        crowded("a/src/lib.rs", &read).unwrap()
    }

    /// Methods whose bodies and types have functions of their own, which do not count.
    fn methods(count: usize) -> String {
        "fn f(g: fn(u8)) -> fn() { fn inner() {} || () }".repeat(count)
    }

    /// A crate in which a type has these methods in each of two files.
    fn divided(used: &str, block: &str, counts: [usize; 2]) -> Vec<String> {
        let root = format!(
            "mod a; mod b; pub use a::*; {}",
            "#[cfg(test)] #[path = \"t.rs\"] mod tests;"
        );
        let [a, b] = counts.map(methods);
        found(&[
            ("lib.rs", root),
            (
                "a.rs",
                format!("pub struct T<A>(A); impl<A: Fn() -> u8> T<A> {{ {a} }}"),
            ),
            ("b.rs", format!("{used} {block} {{ {b} }}")),
            ("t.rs", String::new()),
        ])
    }

    #[test]
    fn type_is_counted_over_its_files() {
        for (used, block) in [
            ("use crate::a::T;", "impl T<u8>"),
            (
                "use super::a::*;",
                "unsafe impl<F> T<F> where F: for<'a> Fn(&'a u8)",
            ),
            ("use crate::T as Other;", "impl Other"),
            ("", "impl crate::T"),
            ("", "#[x] impl super::a::T"),
        ] {
            let too_many = ["a/src/lib.rs: crate::a::T has 41"];
            assert_eq!(divided(used, block, [20, 21]), too_many, "{used} {block}");
            assert_eq!(divided(used, block, [20, 20]), [""; 0], "{used} {block}");
        }
    }

    #[test]
    fn methods_of_others_do_not_count() {
        for block in [
            "struct T; impl T",
            "impl Clone for crate::T",
            "impl<F: for<'a> Fn(&'a u8)> Run<F> for crate::T where F: Send",
            "trait T",
        ] {
            assert_eq!(divided("", block, [20, 30]), [""; 0], "{block}");
        }
    }

    #[test]
    fn methods_of_tests_count() {
        let tests = format!("use super::*; impl T {{ {} }}", methods(21));
        let root = format!(
            "struct T; impl T {{ {} }} #[cfg(test)] #[path = \"t.rs\"] mod x;",
            methods(20)
        );
        let files = [("lib.rs", root), ("t.rs", tests)];
        assert_eq!(found(&files), ["a/src/lib.rs: crate::T has 41"]);
    }
}
