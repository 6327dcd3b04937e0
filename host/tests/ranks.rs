//! Modules know modules of lower ranks only: the table of `ARCHITECTURE.md` against what the sources say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;

/// A use of a module by a file of another.
#[derive(Debug, PartialEq)]
struct Use {
    file: PathBuf,
    by: String,
    of: String,
}

fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Rank of each module, by the rows of the table.
fn ranks() -> BTreeMap<String, u32> {
    let text = std::fs::read_to_string(home().join("ARCHITECTURE.md")).unwrap();
    let row = Regex::new(r"(?m)^\| (\d+) \| ([^|]+) \|").unwrap();
    let name = Regex::new(r"`([a-z_]+)`").unwrap();
    let mut ranks = BTreeMap::new();
    for row in row.captures_iter(&text) {
        let rank = row[1].parse().unwrap();
        for module in name.captures_iter(&row[2]) {
            assert_eq!(ranks.insert(module[1].to_owned(), rank), None, "{} has two rows", &module[1]);
        }
    }
    ranks
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Parts of a file's path below `src`, without the extension.
fn place(file: &Path) -> Vec<String> {
    let parts = file.with_extension("");
    parts.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
}

/// Files of tests: they may use anything.
fn is_test(place: &[String]) -> bool {
    let test =
        |part: &String| part == "tests" || part == "fixtures" || part == "disk" || part.ends_with("_tests");
    place.iter().any(test)
}

/// The code of a file without its tests and comments.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The modules that a file at `place` names: by `crate::`, or by as many `super::` as lead out of its own.
fn modules_of(place: &[String], code: &str) -> Vec<String> {
    let by_crate = Regex::new(r"\bcrate::([a-z_]+)").unwrap();
    let by_super = Regex::new(r"\b((?:super::)+)([a-z_]+)").unwrap();
    let absolute = by_crate.captures_iter(code).map(|found| found[1].to_owned());
    let leads_out = |found: &regex::Captures<'_>| found[1].matches("super::").count() >= place.len();
    let relative = by_super.captures_iter(code).filter(leads_out).map(|found| found[2].to_owned());
    absolute.chain(relative).collect()
}

fn uses() -> Vec<Use> {
    let (root, mut files, mut uses) = (home().join("src"), Vec::new(), Vec::new());
    sources(&root, &mut files);
    for file in files {
        let below = file.strip_prefix(&root).unwrap();
        let place = place(below);
        if is_test(&place) || place == ["lib"] {
            continue;
        }
        let code = code(&std::fs::read_to_string(&file).unwrap());
        assert!(!code.contains("crate::{"), "{}: name modules one by one", file.display());
        for of in modules_of(&place, &code) {
            uses.push(Use { file: below.to_owned(), by: place[0].clone(), of });
        }
    }
    uses
}

/// Modules of the last rank put the others together, and know each other.
fn allowed(ranks: &BTreeMap<String, u32>, by: &str, of: &str) -> bool {
    let top = ranks.values().max();
    by == of || ranks[of] < ranks[by] || ranks.get(by) == top
}

#[test]
fn a_module_knows_modules_of_lower_ranks_only() {
    let (ranks, uses) = (ranks(), uses());
    assert!(uses.len() > 100, "the sources are found");
    let wrong: Vec<_> = uses.iter().filter(|u| !allowed(&ranks, &u.by, &u.of)).collect();
    assert!(wrong.is_empty(), "by the table of ARCHITECTURE.md: {wrong:#?}");
}

#[test]
fn every_module_has_a_rank() {
    let ranks = ranks();
    let text = std::fs::read_to_string(home().join("src/lib.rs")).unwrap();
    let module = Regex::new(r"(?m)^pub mod ([a-z_]+);").unwrap();
    let modules: Vec<_> = module.captures_iter(&text).map(|found| found[1].to_owned()).collect();
    assert!(modules.len() > 8);
    modules.iter().for_each(|module| assert!(ranks.contains_key(module), "{module} has no row"));
}

#[test]
fn a_use_is_seen_however_it_is_written() {
    let place = ["claims".to_owned(), "prepare".to_owned()];
    let text = "use crate::cdi::CdiDir;\nuse super::machine;\nfn f() -> super::super::driver::Call { crate::base::now() }\n\
                // use crate::app\n#[cfg(test)]\nmod tests {\n use crate::north::x;\n}";
    assert_eq!(modules_of(&place, &code(text)), ["cdi", "base", "driver"]);
    let ranks = BTreeMap::from([("cdi".to_owned(), 2), ("driver".to_owned(), 2), ("cli".to_owned(), 6)]);
    assert!(
        !allowed(&ranks, "cdi", "driver") && !allowed(&ranks, "cdi", "cli") && allowed(&ranks, "cli", "cdi")
    );
}
