//! Checks the format, the lints, the words, the table of what a change touches, the errors that code drops, the fields of log lines, the module graphs, the methods of types and the published packages of the workspace.

mod changes;
mod circles;
mod code;
mod debug_fields;
mod methods;
mod modules;
mod swallowed;
mod tokens;
mod words;

use anyhow::{Context, Result, anyhow, ensure};

use crate::drivers::{self, CORE_TARGET};
use crate::workspace::Workspace;
use crate::{package, shell};
use words::{Report, Rules};

const CLIPPY_RULES: [&str; 3] = ["--", "-D", "warnings"];
/// The refused terms and where they are allowed.
const WORDS: &str = "xtask/words.txt";

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    check_words(workspace)?;
    check_reads(workspace)?;
    check_log_fields(workspace)?;
    check_changes(workspace)?;
    check_circles(workspace)?;
    check_methods(workspace)?;
    shell::run(workspace.cargo().args(["fmt", "--all", "--", "--check"]))?;
    shell::run(
        workspace
            .cargo()
            .args(["clippy", "--workspace", "--all-targets"])
            .args(CLIPPY_RULES),
    )?;
    // The programs as they are shipped: without fail points, and without what only tests and fuzzing use. One package alone would have
    // other features of libc, and everything above it would be checked again.
    shell::run(
        workspace
            .cargo()
            .args(["clippy", "--workspace"])
            .args(CLIPPY_RULES),
    )?;
    drivers::ensure_targets(&[CORE_TARGET])?;
    shell::run(
        workspace
            .cargo()
            .args(["clippy", "--target", CORE_TARGET])
            .args(workspace.driver_selection())
            .args(CLIPPY_RULES),
    )?;
    package::check(workspace)
}

/// Checks the words only, and prints the number of refused terms in each directory that may still have them.
pub(crate) fn words(workspace: &Workspace) -> Result<()> {
    let report = check_words(workspace)?;
    for (directory, count) in &report.allowed {
        println!("{count:>6}  {directory}");
    }
    println!("{:>6}  in all", report.allowed.values().sum::<usize>());
    Ok(())
}

fn check_words(workspace: &Workspace) -> Result<Report> {
    let text = std::fs::read_to_string(workspace.root.join(WORDS))
        .with_context(|| format!("reading {WORDS}"))?;
    let rules = Rules::parse(&text).map_err(|invalid| anyhow!("{WORDS}:\n{invalid}"))?;
    let mut report = Report::default();
    for path in tracked_files(workspace)? {
        // Files that are binary, or deleted and not committed yet, have no words.
        if let Ok(text) = std::fs::read_to_string(workspace.root.join(&path)) {
            report.file(&rules, &path, &text);
        }
    }
    let findings: Vec<_> = report.findings.iter().map(ToString::to_string).collect();
    ensure!(
        findings.is_empty(),
        "terms that {WORDS} refuses:\n{}",
        findings.join("\n")
    );
    let unused = report.unused(&rules);
    ensure!(
        unused.is_empty(),
        "rules of {WORDS} that allow nothing and can be removed: lines {unused:?}"
    );
    Ok(report)
}

/// Checks that no read that failed looks like nothing.
pub(crate) fn check_reads(workspace: &Workspace) -> Result<()> {
    let mut findings = Vec::new();
    for path in tracked_files(workspace)?
        .into_iter()
        .filter(|path| swallowed::is_production(path))
    {
        let file = workspace.root.join(&path);
        if file.try_exists()? {
            let text = std::fs::read_to_string(file).with_context(|| format!("reading {path}"))?;
            findings.extend(swallowed::findings(&path, &text));
        }
    }
    let findings: Vec<_> = findings.iter().map(ToString::to_string).collect();
    ensure!(
        findings.is_empty(),
        "reads whose failure looks like nothing; return the error, or say in `// no error: WHY` why it is none:\n{}",
        findings.join("\n")
    );
    Ok(())
}

/// Checks that no line of the log shows a value in Rust's form.
fn check_log_fields(workspace: &Workspace) -> Result<()> {
    let mut findings = Vec::new();
    for path in tracked_files(workspace)?
        .into_iter()
        .filter(|path| swallowed::is_production(path))
    {
        let file = workspace.root.join(&path);
        if file.try_exists()? {
            let text = std::fs::read_to_string(file).with_context(|| format!("reading {path}"))?;
            findings.extend(debug_fields::findings(&path, &text));
        }
    }
    ensure!(
        findings.is_empty(),
        "fields of log lines in Rust's form (`?field`); give them a form for readers:\n{}",
        findings.join("\n")
    );
    Ok(())
}

/// Checks the table of what a change touches.
fn check_changes(workspace: &Workspace) -> Result<()> {
    let page = workspace.root.join(changes::PAGE);
    let page =
        std::fs::read_to_string(page).with_context(|| format!("reading {}", changes::PAGE))?;
    let table = changes::parse(&page).map_err(|wrong| anyhow!(wrong))?;
    let mut files = Vec::new();
    for path in tracked_files(workspace)? {
        let file = workspace.root.join(&path);
        if changes::is_looked_at(&path) && file.try_exists()? {
            let text = std::fs::read_to_string(file).with_context(|| format!("reading {path}"))?;
            files.push((path, text));
        }
    }
    let differ: Vec<_> = table
        .iter()
        .flat_map(|change| changes::differences(change, &files))
        .collect();
    ensure!(
        differ.is_empty(),
        "{} does not agree with the files:\n{}",
        changes::PAGE,
        differ.join("\n")
    );
    Ok(())
}

/// Checks that no crate has a circle of modules.
fn check_circles(workspace: &Workspace) -> Result<()> {
    let mut found = Vec::new();
    for root in roots(workspace, modules::is_root)? {
        found.extend(circles::circles(&root, &|path| read(workspace, path))?);
    }
    let found: Vec<_> = found.iter().map(ToString::to_string).collect();
    ensure!(
        found.is_empty(),
        "modules that need one another; move what they share below them:\n{}",
        found.join("\n")
    );
    Ok(())
}

/// Checks that no type has too many methods.
fn check_methods(workspace: &Workspace) -> Result<()> {
    let mut found = Vec::new();
    let is_root = |path: &str| modules::is_root(path) || modules::is_root_of_tests(path);
    for root in roots(workspace, is_root)? {
        found.extend(methods::crowded(&root, &|path| read(workspace, path))?);
    }
    ensure!(
        found.is_empty(),
        "types with more than {} methods; divide each by its responsibilities:\n{}",
        methods::METHODS_MAX,
        found.join("\n")
    );
    Ok(())
}

/// Returns the roots of crates that are there.
fn roots(workspace: &Workspace, is_root: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let mut roots = tracked_files(workspace)?;
    roots.retain(|path| is_root(path) && workspace.root.join(path).exists());
    Ok(roots)
}

/// Reads a file of the workspace; returns nothing if it is not there.
fn read(workspace: &Workspace, path: &str) -> Result<Option<String>> {
    match std::fs::read_to_string(workspace.root.join(path)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {path}")),
    }
}

/// Returns the files of the repository, new ones included, without the rules themselves and lock files.
fn tracked_files(workspace: &Workspace) -> Result<Vec<String>> {
    let mut git = std::process::Command::new("git");
    git.current_dir(&workspace.root).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let paths = shell::read(&mut git)?;
    let is_ours = |path: &&str| !path.is_empty() && *path != WORDS && !path.ends_with(".lock");
    Ok(paths
        .split('\0')
        .filter(is_ours)
        .map(str::to_owned)
        .collect())
}
