//! Finds circles in the module graphs of crates.
//!
//! # The rule
//!
//! A module names another if its code, or code in a module below it, has a path to the other or below it: in a `use`, or as
//! `crate::a::b`, `super::a` or `child::a` in an expression or a type. A path that ends at a `use` of another module, public or not, leads to
//! where that `use` leads. The modules that one module declares are its children, and among the children of each module no child names,
//! directly or by others, a child that names it: there is an order in which they can be read.
//!
//! A module and those below it are one: a parent may name its children, which it composes, and they may name what the parent itself
//! defines. Code that only tests or builds with a feature have (`#[cfg(test)]`, `#[cfg(feature = …)]`) is not looked at.
//!
//! Given the path of a crate's root and a function that reads a file; returns the circles. No IO of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::Result;

use super::modules::{Code, Modules, Path, shown};

/// Modules that need one another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Circle {
    /// The root of the crate.
    root: String,
    /// The module that declares them.
    parent: Path,
    modules: Vec<String>,
    steps: Steps,
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (root, parent) = (&self.root, shown(&self.parent));
        write!(f, "{root}: in {parent}: {}", self.modules.join(", "))?;
        for (from, to) in &self.steps {
            write!(f, "\n  {} names {}", shown(from), shown(to))?;
        }
        Ok(())
    }
}

/// Returns the circles of a crate. `read` returns nothing for a file that is not there.
pub(super) fn circles(
    root: &str,
    read: &dyn Fn(&str) -> Result<Option<String>>,
) -> Result<Vec<Circle>> {
    let modules = Modules::read(root, read, Code::OfEveryBuild)?;
    let mut graphs: BTreeMap<Path, Graph> = BTreeMap::new();
    for (from, to) in modules.names() {
        let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
        if let (Some(a), Some(b)) = (from.get(common), to.get(common)) {
            let graph = graphs.entry(from[..common].to_vec()).or_default();
            let named = graph.0.entry(a.clone()).or_default();
            named.entry(b.clone()).or_insert((from.clone(), to.clone()));
        }
    }
    let circles = graphs.into_iter().flat_map(|(parent, graph)| {
        graph
            .circles()
            .into_iter()
            .map(move |(modules, steps)| Circle {
                root: root.to_owned(),
                parent: parent.clone(),
                modules,
                steps,
            })
    });
    Ok(circles.collect())
}

/// A path for each step of a circle: the module that has it, and the one that it names.
type Steps = Vec<(Path, Path)>;

/// Map from each child module to those that it names, with an example.
#[derive(Default)]
struct Graph(BTreeMap<String, BTreeMap<String, (Path, Path)>>);

impl Graph {
    fn circles(&self) -> Vec<(Vec<String>, Steps)> {
        let mut circles = Vec::new();
        let mut done = BTreeSet::new();
        for module in self.0.keys() {
            let reached = self.reached(module);
            let circle: Vec<_> = reached
                .into_iter()
                .filter(|other| self.reached(other).contains(module))
                .collect();
            if circle.len() > 1 && done.insert(circle.clone()) {
                let steps = circle.iter().flat_map(|from| {
                    let named = self.0.get(from).into_iter().flatten();
                    named.filter(|(to, _)| circle.contains(to))
                });
                let steps = steps.map(|(_, step)| step.clone()).collect();
                circles.push((circle, steps));
            }
        }
        circles
    }

    fn reached(&self, module: &str) -> BTreeSet<String> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![module]);
        while let Some(module) = next.pop() {
            for named in self.0.get(module).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(named.clone()) {
                    next.push(named);
                }
            }
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Circles of a crate with these files below `src/`, as they are shown without their steps.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let read = |path: &str| {
            let file = files
                .iter()
                .find(|(name, _)| path == format!("a/src/{name}"));
            Ok(file.map(|(_, text)| (*text).to_owned()))
        };
        let circles = circles("a/src/lib.rs", &read).unwrap();
        let shown = circles
            .iter()
            .map(|circle| format!("{}: {}", shown(&circle.parent), circle.modules.join(", ")));
        shown.collect()
    }

    #[test]
    fn cycle_is_found_in_every_notation() {
        for (a, b) in [
            ("use crate::b::B;", "use crate::a::A;"),
            ("use super::{c, b::{self, B}};", "fn f() { crate::a::g() }"),
            ("fn f(b: super::b::B) {}", "use crate::{a as other};"),
            (
                "fn f() -> impl A + use<'_> { let b = 1; super::b::B }",
                "use crate::a;",
            ),
            ("pub use super::b::*;", "mod below { use super::super::a; }"),
            ("use crate::B;", "use super::a::{A};"),
        ] {
            let root = "mod a; mod b; pub use b::B;";
            let files = [("lib.rs", root), ("a.rs", a), ("b.rs", b)];
            assert_eq!(found(&files), ["crate: a, b"], "{a} {b}");
        }
    }

    #[test]
    fn cycle_below_a_module_is_found() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod x; mod y { use crate::a::z; } mod z;"),
            ("a/x.rs", "use super::y;"),
            ("a/z.rs", "use super::x::X;"),
        ];
        assert_eq!(found(&files), ["crate::a: x, y, z"]);
    }

    #[test]
    fn an_order_is_no_circle() {
        for (root, a, b) in [
            // A parent and its children.
            (
                "mod a; mod b; use a::A; pub struct R;",
                "use crate::R;",
                "use crate::a::A;",
            ),
            // Code of tests, and of features.
            (
                "mod a; mod b;",
                "#[cfg(test)]\nmod tests { use crate::b; }",
                "use crate::a;",
            ),
            (
                "mod a; mod b;",
                "#[cfg(feature = \"f\")] #[x]\nuse crate::b;",
                "use crate::a;",
            ),
            (
                "mod a; mod b;",
                "/// See crate::b::B.\nconst A: &str = r#\"\"crate::b::B\"\"#;",
                "use crate::a;",
            ),
            // Another crate with the name of a module.
            ("mod a; mod b;", "use b::B; use ::b::C;", "use crate::a;"),
        ] {
            let files = [("lib.rs", root), ("a.rs", a), ("b.rs", b)];
            assert_eq!(found(&files), [""; 0], "{a} {b}");
        }
    }

    #[test]
    fn code_beside_tests_is_looked_at() {
        let a = "#[cfg(test)] use x::Y; #[cfg(not(test))] use crate::b;";
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", a),
            ("b.rs", "use crate::a;"),
        ];
        assert_eq!(found(&files), ["crate: a, b"]);
    }
}
