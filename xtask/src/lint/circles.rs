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

use anyhow::{Context, Result, bail};

use super::code::code_of;

/// Re-exports that are followed from one path.
const USES_MAX: usize = 8;

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

impl Circle {
    /// The crate's root and the parent of the modules.
    pub(super) fn place(&self) -> (&str, String) {
        (&self.root, shown(&self.parent))
    }
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (root, parent) = self.place();
        write!(f, "{root}: in {parent}: {}", self.modules.join(", "))?;
        for (from, to) in &self.steps {
            write!(f, "\n  {} names {}", shown(from), shown(to))?;
        }
        Ok(())
    }
}

/// A module, from the root of its crate.
type Path = Vec<String>;

fn shown(path: &[String]) -> String {
    std::iter::once("crate")
        .chain(path.iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join("::")
}

/// Whether a file is the root of a library or program.
pub(super) fn is_root(path: &str) -> bool {
    let Some((_, file)) = path.split_once("/src/") else {
        return false;
    };
    let is_program = file.strip_prefix("bin/").is_some_and(|file| {
        let is_file = !file.contains('/') && file.ends_with(".rs");
        is_file || (file.split('/').count() == 2 && file.ends_with("/main.rs"))
    });
    (matches!(file, "lib.rs" | "main.rs") || is_program) && !path.contains("/templates/")
}

/// Returns the circles of a crate. `read` returns nothing for a file that is not there.
pub(super) fn circles(
    root: &str,
    read: &dyn Fn(&str) -> Result<Option<String>>,
) -> Result<Vec<Circle>> {
    let mut modules = Modules {
        read,
        found: BTreeMap::new(),
    };
    let (directory, _) = root.rsplit_once('/').unwrap_or_default();
    modules.file(root, directory, Vec::new())?;
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

/// Which child names which, with an example.
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

/// The modules of a crate.
struct Modules<'a> {
    read: &'a dyn Fn(&str) -> Result<Option<String>>,
    found: BTreeMap<Path, Module>,
}

/// What a module names, by paths as they are written, without `use` and with.
#[derive(Default)]
struct Module {
    paths: Vec<Path>,
    /// By the name that a `use` brings; `*` for all names.
    uses: Vec<(String, Path)>,
}

impl Modules<'_> {
    fn file(&mut self, file: &str, directory: &str, module: Path) -> Result<()> {
        let text = (self.read)(file)?.with_context(|| format!("there is no file {file}"))?;
        let code = code_of(&text);
        let mut tokens = Tokens(without_tests(tokens(&code)).into());
        self.module(&mut tokens, directory, module)
    }

    /// Reads a module up to the brace that ends it, or to the end of its file.
    fn module(&mut self, tokens: &mut Tokens<'_>, directory: &str, module: Path) -> Result<()> {
        let (mut found, mut depth) = (Module::default(), 0);
        while let Some(token) = tokens.next() {
            match token {
                "mod" => {
                    let (name, next) = (tokens.next().unwrap_or_default(), tokens.next());
                    let below = format!("{directory}/{name}");
                    let child = [module.as_slice(), &[name.to_owned()]].concat();
                    match next {
                        Some("{") => self.module(tokens, &below, child)?,
                        Some(";") => self.file(&format!("{below}.rs"), &below, child)?,
                        _ => bail!("{}: mod {name} is no module", shown(&module)),
                    }
                }
                // Not of `impl Trait + use<T>`.
                "use" if tokens.peek() != Some("<") => used(tokens, Vec::new(), &mut found.uses),
                "{" => depth += 1,
                "}" if depth == 0 => break,
                "}" => depth -= 1,
                word if is_word(word) && tokens.peek() == Some("::") => {
                    let mut path = vec![word.to_owned()];
                    while tokens.peek() == Some("::") {
                        tokens.next();
                        match tokens.peek().filter(|word| is_word(word)) {
                            Some(word) => path.push(word.to_owned()),
                            None => break,
                        }
                        tokens.next();
                    }
                    found.paths.push(path);
                }
                _ => {}
            }
        }
        self.found.insert(module, found);
        Ok(())
    }

    /// Each module with each one that it names.
    fn names(&self) -> BTreeSet<(Path, Path)> {
        let all = self.found.iter().flat_map(|(from, module)| {
            let uses = module.uses.iter().map(|(_, path)| path);
            let named = module
                .paths
                .iter()
                .chain(uses)
                .filter_map(|path| self.named(from, path, 0));
            named.map(|to| (from.clone(), to)).collect::<Vec<_>>()
        });
        all.collect()
    }

    /// The module that a path in a module leads to; none: it is of another crate.
    fn named(&self, module: &[String], path: &[String], uses: usize) -> Option<Path> {
        let mut rest = path;
        let mut at = match rest.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => module.to_vec(),
            child if self.has(module, child) => module.to_vec(),
            _ => return None,
        };
        while let Some(("crate" | "self", after)) = first(rest) {
            rest = after;
        }
        while let Some(("super", after)) = first(rest) {
            at.pop();
            rest = after;
        }
        while let Some((name, after)) = first(rest) {
            if self.has(&at, name) {
                at.push(name.to_owned());
                rest = after;
                continue;
            }
            let declared = self.found.get(&at).map_or(&[][..], |module| &module.uses);
            let found = declared.iter().filter(|(brought, _)| brought == name);
            let mut led = found.filter_map(|(_, path)| match uses < USES_MAX {
                true => self.named(&at, path, uses + 1),
                false => None,
            });
            return Some(led.next().unwrap_or(at));
        }
        Some(at)
    }

    fn has(&self, module: &[String], child: &str) -> bool {
        self.found
            .contains_key(&[module, &[child.to_owned()]].concat())
    }
}

fn first(path: &[String]) -> Option<(&str, &[String])> {
    path.split_first().map(|(name, rest)| (name.as_str(), rest))
}

/// Reads the tree of a `use` up to its end.
fn used(tokens: &mut Tokens<'_>, mut path: Path, uses: &mut Vec<(String, Path)>) {
    while let Some(token) = tokens.peek() {
        match token {
            "," | "}" | ";" => break,
            "::" => {}
            "{" => {
                tokens.next();
                while tokens
                    .peek()
                    .is_some_and(|token| !matches!(token, "}" | ";"))
                {
                    used(tokens, path.clone(), uses);
                    if tokens.peek() == Some(",") {
                        tokens.next();
                    }
                }
                tokens.next();
                return;
            }
            "as" => {
                tokens.next();
                let name = tokens.next().unwrap_or_default().to_owned();
                return uses.push((name, path));
            }
            // Of `a::{self}`.
            "self" if !path.is_empty() => {}
            word => path.push(word.to_owned()),
        }
        tokens.next();
    }
    if path.last().is_some_and(|name| name == "*") {
        path.pop();
        return uses.push(("*".to_owned(), path));
    }
    if let Some(name) = path.last().cloned() {
        uses.push((name, path));
    }
}

struct Tokens<'a>(std::collections::VecDeque<&'a str>);

impl<'a> Tokens<'a> {
    fn next(&mut self) -> Option<&'a str> {
        self.0.pop_front()
    }

    fn peek(&self) -> Option<&'a str> {
        self.0.front().copied()
    }
}

/// Words, `::`, and each other sign.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(next) = rest.chars().next() {
        let length = match next {
            _ if rest.starts_with("::") => 2,
            next if is_in_word(next) => rest.find(|c| !is_in_word(c)).unwrap_or(rest.len()),
            next => next.len_utf8(),
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

fn is_in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Removes what only tests or builds with a feature have: the item, field or arm after each such attribute.
fn without_tests(tokens: Vec<&str>) -> Vec<&str> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].starts_with(&["#", "[", "cfg"]) {
            kept.push(tokens[at]);
            at += 1;
            continue;
        }
        let end = at + 2 + group(&tokens[at + 1..]);
        let condition = &tokens[at..end.min(tokens.len())];

        at = end;
        if ["test", "feature"]
            .iter()
            .any(|word| condition.contains(word))
            && !condition.contains(&"not")
        {
            at += item(&tokens[at.min(tokens.len())..]);
        }
    }
    kept
}

/// The index of the bracket that closes the first one.
fn group(tokens: &[&str]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// The tokens of an item, with its attributes.
fn item(tokens: &[&str]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at] {
            ";" | "," => return at + 1,
            "{" => return at + group(&tokens[at..]) + 1,
            // The end of what the item is in.
            "}" | ")" | "]" => return at,
            "(" | "[" => at += group(&tokens[at..]) + 1,
            _ => at += 1,
        }
    }
    at
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
    fn a_circle_is_found_however_it_is_written() {
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
    fn a_circle_below_a_module_is_found() {
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

    #[test]
    fn roots_are_libraries_and_programs() {
        for root in [
            "a/src/lib.rs",
            "a/src/main.rs",
            "a/src/bin/b.rs",
            "a/src/bin/b/main.rs",
        ] {
            assert!(is_root(root), "{root}");
        }
        for file in [
            "a/src/b.rs",
            "a/tests/main.rs",
            "a/src/bin/b/c.rs",
            "a/templates/b/src/lib.rs",
        ] {
            assert!(!is_root(file), "{file}");
        }
    }
}
