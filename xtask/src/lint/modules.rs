//! The modules of crates: what they declare, what they name, and where a path leads.
//!
//! Given the path of a crate's root and a function that reads a file. No IO of its own.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};

use super::code::code_of;
use super::tokens::{Tokens, angles, group, is_word, tokens, without_tests};

/// Re-exports that are followed from one path.
const USES_MAX: usize = 8;

/// A module, from the root of its crate; or a path as it is written.
pub(super) type Path = Vec<String>;

/// Reads a file; returns nothing for one that is not there.
pub(super) type Read<'a> = &'a dyn Fn(&str) -> Result<Option<String>>;

pub(super) fn shown(path: &[String]) -> String {
    std::iter::once("crate")
        .chain(path.iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join("::")
}

/// Returns whether a file is the root of a library or program.
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

/// Returns whether a file is the root of a suite of tests, a fuzz target or a build script.
pub(super) fn is_root_of_tests(path: &str) -> bool {
    if path.contains("/src/") || path.contains("/templates/") || !path.ends_with(".rs") {
        return false;
    }
    let (directory, file) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = directory.rsplit('/').next();
    matches!(file, "main.rs" | "build.rs") || matches!(parent, Some("tests" | "fuzz_targets"))
}

/// The code of a crate that is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    /// Modules that tests and builds with features do not add.
    OfEveryBuild,
    All,
}

/// The modules of a crate.
pub(super) struct Modules<'a> {
    read: Read<'a>,
    code: Code,
    found: BTreeMap<Path, Module>,
}

#[derive(Default)]
pub(super) struct Module {
    /// Paths as they are written, without those of `use`.
    paths: Vec<Path>,
    /// Paths of `use` by the name that it brings; `*` for all names.
    uses: Vec<(String, Path)>,
    types: BTreeSet<String>,
    /// The types of its inherent `impl` blocks as they are written, with the number of methods.
    pub(super) methods: Vec<(Path, usize)>,
}

/// Directories of a file.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// The directory that it is in.
    beside: &'a str,
    /// The directory of its child modules.
    below: &'a str,
}

impl<'a> Modules<'a> {
    pub(super) fn read(root: &str, read: Read<'a>, code: Code) -> Result<Self> {
        let mut modules = Modules {
            read,
            code,
            found: BTreeMap::new(),
        };
        modules.file(root, directory_of(root), Vec::new())?;
        Ok(modules)
    }

    fn file(&mut self, file: &str, below: &str, module: Path) -> Result<()> {
        let text = (self.read)(file)?.with_context(|| format!("there is no file {file}"))?;
        let code = code_of(&text);
        let mut all = tokens(&code);
        if self.code == Code::OfEveryBuild {
            all = without_tests(all);
        }
        let beside = directory_of(file);
        self.module(&mut Tokens::new(all), Place { beside, below }, module)
    }

    /// Reads a module up to the brace that ends it, or to the end of its file.
    fn module(&mut self, tokens: &mut Tokens<'_>, place: Place<'_>, module: Path) -> Result<()> {
        let (mut found, mut depth) = (Module::default(), 0);
        let (mut before, mut path) = ("", None);
        while let Some(token) = tokens.next() {
            let begins_item = matches!(before, "" | "{" | "}" | ";" | "]" | "unsafe");
            before = token;
            match token {
                "mod" if tokens.peek().is_some_and(is_word) => {
                    before = ";";
                    let (name, next) = (tokens.next().unwrap_or_default(), tokens.next());
                    let below = format!("{}/{name}", place.below);
                    let child = [module.as_slice(), &[name.to_owned()]].concat();
                    match (next, path.take()) {
                        (Some("{"), _) => {
                            let below = &below;
                            self.module(tokens, Place { below, ..place }, child)?;
                        }
                        (Some(";"), None) => self.file(&format!("{below}.rs"), &below, child)?,
                        (Some(";"), Some(path)) => {
                            let file = format!("{}/{path}", place.beside);
                            self.file(&file, directory_of(&file), child)?;
                        }
                        _ => bail!("{}: mod {name} is no module", shown(&module)),
                    }
                }
                "path" if tokens.rest().starts_with(&["=", "\""]) => {
                    let quoted = tokens.rest()[2..]
                        .iter()
                        .take_while(|token| **token != "\"");
                    path = Some(quoted.copied().collect::<String>());
                }
                "struct" | "enum" | "union" | "trait" | "type" => {
                    let name = tokens.peek().filter(|name| is_word(name));
                    found.types.extend(name.map(str::to_owned));
                }
                "impl" if begins_item => found.methods.extend(inherent(tokens.rest())),
                // Not of `impl Trait + use<T>`.
                "use" if tokens.peek() != Some("<") => used(tokens, Vec::new(), &mut found.uses),
                "{" => depth += 1,
                "}" if depth == 0 => break,
                "}" => depth -= 1,
                word if is_word(word) && tokens.peek() == Some("::") => {
                    found.paths.push(path_from(word, tokens));
                }
                _ => {}
            }
        }
        let all = self.found.entry(module).or_default();
        all.paths.append(&mut found.paths);
        all.uses.append(&mut found.uses);
        all.types.append(&mut found.types);
        all.methods.append(&mut found.methods);
        Ok(())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, &Module)> {
        self.found.iter()
    }

    /// Each module with each one that it names.
    pub(super) fn names(&self) -> BTreeSet<(Path, Path)> {
        let all = self.found.iter().flat_map(|(from, module)| {
            let uses = module.uses.iter().map(|(_, path)| path);
            let named = module.paths.iter().chain(uses);
            named.filter_map(|path| Some((from.clone(), self.named(from, path, 0)?.0)))
        });
        all.collect()
    }

    /// The module that declares a type which a path in a module names, and the type's name.
    pub(super) fn declaring(&self, module: &[String], path: &[String]) -> (Path, String) {
        let from_here = match path.first().map(String::as_str) {
            Some("crate" | "self" | "super") => path.to_vec(),
            _ => [&["self".to_owned()], path].concat(),
        };
        let written = path.last().cloned().unwrap_or_default();
        let (at, name) = match self.named(module, &from_here, 0) {
            Some((at, name)) => (at, name.unwrap_or(written)),
            None => (module.to_vec(), written),
        };
        (self.by_glob(&at, &name, 0).unwrap_or(at), name)
    }

    /// The module that declares a name which is in a module, or which a `use` of all names brings there.
    fn by_glob(&self, module: &[String], name: &str, uses: usize) -> Option<Path> {
        let found = self.found.get(module).filter(|_| uses < USES_MAX)?;
        if found.types.contains(name) {
            return Some(module.to_vec());
        }
        let globs = found.uses.iter().filter(|(brought, _)| brought == "*");
        let mut modules = globs.filter_map(|(_, path)| self.named(module, path, 0));
        modules.find_map(|(other, _)| self.by_glob(&other, name, uses + 1))
    }

    /// The module that a path in a module leads to, and the name in it where the path ends at one; none: it is of another crate.
    fn named(
        &self,
        module: &[String],
        path: &[String],
        uses: usize,
    ) -> Option<(Path, Option<String>)> {
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
            return Some(led.next().unwrap_or_else(|| (at, Some(name.to_owned()))));
        }
        Some((at, None))
    }

    fn has(&self, module: &[String], child: &str) -> bool {
        self.found
            .contains_key(&[module, &[child.to_owned()]].concat())
    }
}

fn directory_of(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Reads a path that begins with a word.
fn path_from(word: &str, tokens: &mut Tokens<'_>) -> Path {
    let mut path = vec![word.to_owned()];
    while tokens.peek() == Some("::") {
        tokens.next();
        match tokens.peek().filter(|word| is_word(word)) {
            Some(word) => path.push(word.to_owned()),
            None => break,
        }
        tokens.next();
    }
    path
}

/// The type of an `impl` block without a trait, and the number of its methods. Given the tokens after `impl`.
fn inherent(tokens: &[&str]) -> Option<(Path, usize)> {
    let tokens = match tokens.first() {
        Some(&"<") => tokens.get(angles(tokens) + 1..)?,
        _ => tokens,
    };
    let (header, block) = tokens.split_at(tokens.iter().position(|token| *token == "{")?);
    let of_trait = |pair: &[&str]| pair[0] == "for" && pair[1] != "<";
    if header.windows(2).any(of_trait) {
        return None;
    }
    let is_of_path = |token: &&&str| **token == "::" || is_word(token) && **token != "where";
    let path = header.iter().take_while(is_of_path);
    let path = path.filter(|token| !matches!(**token, "::" | "dyn"));
    let path: Path = path.map(|token| (*token).to_owned()).collect();
    (!path.is_empty()).then(|| (path, methods(&block[..group(block)])))
}

/// Functions of a block.
fn methods(block: &[&str]) -> usize {
    let (mut depth, mut count) = (0, 0);
    for (at, token) in block.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            // No type of a function pointer.
            "fn" if depth == 1 && block.get(at + 1).is_some_and(|name| is_word(name)) => count += 1,
            _ => {}
        }
    }
    count
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

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn suites_and_build_scripts_are_roots() {
        for root in [
            "a/tests/b.rs",
            "a/tests/b/main.rs",
            "a/build.rs",
            "a/fuzz_targets/b.rs",
        ] {
            assert!(is_root_of_tests(root), "{root}");
        }
        for file in [
            "a/tests/b/c.rs",
            "a/src/tests/b.rs",
            "a/src/main.rs",
            "a/tests/b.txt",
        ] {
            assert!(!is_root_of_tests(file), "{file}");
        }
    }
}
