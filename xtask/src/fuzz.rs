//! Fuzzing for a bounded time: every target of `fuzz/`, from its seeds and from the corpus of earlier runs.
//!
//! cargo-fuzz builds the targets with the toolchain of the workspace and without a sanitizer: the code under test is safe Rust, and a
//! target looks for panics, violated properties, and inputs that take too much time or memory.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::machine::{self, Finding};
use crate::shell;
use crate::workspace::Workspace;

/// Seconds that one input may take.
const TIMEOUT: u32 = 10;
/// MiB of resident memory of a target, and of a single allocation.
const MEMORY: u32 = 1024;
/// Text before the path of an input that libFuzzer kept.
const KEPT: &str = "Test unit written to ";

struct Fuzzer<'a> {
    workspace: &'a Workspace,
    directory: PathBuf,
    /// Builds, and the corpus for the next run.
    target: PathBuf,
}

/// Duration and seed of a run.
pub(crate) struct Bounds {
    /// Seconds for each target.
    pub(crate) seconds: u32,
    /// `None`: a random seed.
    pub(crate) seed: Option<u32>,
}

pub(crate) fn run(
    workspace: &Workspace,
    bounds: &Bounds,
    report: bool,
    chosen: &[String],
) -> Result<()> {
    let fuzzer = Fuzzer::of(workspace);
    let targets = chosen_of(fuzzer.targets()?, chosen)?;
    if !fuzzer.build()? {
        return Ok(());
    }
    let mut found = Vec::new();
    // Each has a processor of its own.
    for together in targets.chunks(thread::available_parallelism().map_or(1, usize::from)) {
        let outcomes: Vec<_> = thread::scope(|scope| {
            let running: Vec<_> = together
                .iter()
                .map(|target| scope.spawn(|| fuzzer.fuzz(target, bounds)))
                .collect();
            running
                .into_iter()
                .map(|one| one.join().expect("it does not panic"))
                .collect()
        });
        for outcome in outcomes {
            found.extend(outcome?);
        }
    }
    if found.is_empty() {
        eprintln!(
            "{} targets, {} s each, found nothing",
            targets.len(),
            bounds.seconds
        );
    } else {
        let found = format!("the fuzzer found:\n{}", found.join("\n"));
        ensure!(report, found);
        eprintln!("{found}");
    }
    Ok(())
}

/// Builds the targets, if the tools are installed.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    Fuzzer::of(workspace).build().map(drop)
}

/// Returns the requested targets, or all.
fn chosen_of(targets: Vec<String>, chosen: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = chosen.iter().find(|name| !targets.contains(name)) {
        bail!(
            "there is no fuzz target {unknown}; there are {}",
            targets.join(", ")
        );
    }
    Ok(if chosen.is_empty() {
        targets
    } else {
        chosen.to_vec()
    })
}

impl<'a> Fuzzer<'a> {
    fn of(workspace: &'a Workspace) -> Self {
        Self {
            workspace,
            directory: workspace.root.join("fuzz"),
            target: workspace.target.join("fuzz"),
        }
    }

    /// Returns whether the tools are installed, and then has built the targets.
    fn build(&self) -> Result<bool> {
        for (what, finding) in [
            ("cargo-fuzz", machine::cargo_fuzz()),
            ("libFuzzer", machine::cplusplus()),
        ] {
            if let Finding::Missing(why) = finding {
                eprintln!("skipped: fuzzing: {what}: {why}");
                return Ok(false);
            }
        }
        shell::run(&mut self.command("build", &[])).map(|()| true)
    }

    /// Returns all targets, by the names of their files.
    fn targets(&self) -> Result<Vec<String>> {
        let directory = self.directory.join("fuzz_targets");
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("reading {}", directory.display()))?;
        let mut names = Vec::new();
        for entry in entries {
            let path = entry
                .with_context(|| format!("reading {}", directory.display()))?
                .path();
            names.extend(
                path.file_stem()
                    .and_then(|stem| stem.to_str())
                    .map(str::to_owned),
            );
        }
        names.sort();
        Ok(names)
    }

    /// Returns cargo-fuzz with the flags that must be equal in a build and a run; otherwise cargo builds everything again.
    fn command(&self, task: &str, args: &[&str]) -> Command {
        let mut command = self.workspace.cargo();
        command.args([
            "fuzz",
            task,
            "--sanitizer",
            "none",
            "--no-cfg-fuzzing",
            "--codegen-units",
            "16",
        ]);
        command
            .arg("--fuzz-dir")
            .arg(&self.directory)
            .arg("--target-dir")
            .arg(&self.target)
            .args(args);
        command
    }

    /// Prints a finding.
    fn fuzz(&self, target: &str, bounds: &Bounds) -> Result<Option<String>> {
        let corpus = self.target.join("corpus").join(target);
        std::fs::create_dir_all(&corpus)
            .with_context(|| format!("creating {}", corpus.display()))?;
        let mut command = self.command("run", &[target]);
        command
            .arg(corpus)
            .arg(self.directory.join("seeds").join(target))
            .arg("--")
            .args(limits());
        command.arg(format!("-max_total_time={}", bounds.seconds));
        command.args(bounds.seed.map(|seed| format!("-seed={seed}")));
        let mut kept = None;
        let status = shell::watched(
            &mut command,
            |_| (),
            |line| kept = kept_in(line).or(kept.take()),
        )?;
        let Some(input) = finding(target, status, kept)? else {
            return Ok(None);
        };
        let mut again = self.command("run", &[target, &input]);
        let again = shell::line(again.arg("--").args(limits()));
        Ok(Some(format!("{target}: {input}\n  reproduce: {again}")))
    }
}

/// Limits of one input.
fn limits() -> [String; 2] {
    [
        format!("-timeout={TIMEOUT}"),
        format!("-rss_limit_mb={MEMORY}"),
    ]
}

/// Returns the input that a failed target found. A target that failed without an input did not run, which is an error.
fn finding(target: &str, status: ExitStatus, kept: Option<String>) -> Result<Option<String>> {
    if status.success() {
        return Ok(None);
    }
    let Some(input) = kept else {
        bail!("{target} ended with {status} and kept no input")
    };
    Ok(Some(input))
}

/// Parses the path in libFuzzer's line about a kept input.
fn kept_in(line: &str) -> Option<String> {
    line.split_once(KEPT)
        .map(|(_, path)| path.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn all_targets_are_fuzzed_by_default() {
        let targets = || words(&["answers", "grant"]);
        assert_eq!(chosen_of(targets(), &[]).unwrap(), targets());
        assert_eq!(chosen_of(targets(), &words(&["grant"])).unwrap(), ["grant"]);
        let error = chosen_of(targets(), &words(&["grants"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("grants") && error.contains("answers, grant"),
            "{error}"
        );
    }

    #[test]
    fn failing_fuzz_input_is_named() {
        let line = "artifact_prefix='/f/artifacts/grant/'; Test unit written to /f/artifacts/grant/crash-0f\n";
        assert_eq!(
            kept_in(line).as_deref(),
            Some("/f/artifacts/grant/crash-0f")
        );
        assert_eq!(kept_in("#2 INITED cov: 5"), None);
    }

    #[test]
    fn failure_without_input_is_no_finding() {
        use std::os::unix::process::ExitStatusExt;
        let (good, bad) = (ExitStatus::from_raw(0), ExitStatus::from_raw(77 << 8));
        let slow = || Some("/f/artifacts/grant/slow-unit-0f".to_owned());
        assert_eq!(finding("grant", bad, slow()).unwrap(), slow());
        assert_eq!(
            (
                finding("grant", good, slow()).unwrap(),
                finding("grant", good, None).unwrap()
            ),
            (None, None)
        );
        let error = finding("grant", bad, None).unwrap_err().to_string();
        assert_eq!(error, "grant ended with exit status: 77 and kept no input");
    }

    #[test]
    fn page_shows_how_findings_reproduce() {
        let workspace = Workspace::load().unwrap();
        let page = std::fs::read_to_string(workspace.root.join("docs/fuzzing.md")).unwrap();
        let (directory, target) = (PathBuf::from("fuzz"), PathBuf::from("target/fuzz"));
        let fuzzer = Fuzzer {
            workspace: &workspace,
            directory,
            target,
        };
        let mut command = fuzzer.command("run", &["TARGET", "fuzz/artifacts/TARGET/FILE"]);
        let line = shell::line(command.arg("--").args(limits()));
        assert!(page.contains(&line), "docs/fuzzing.md must have: {line}");
    }

    #[test]
    fn every_target_is_built_with_seeds() {
        let workspace = Workspace::load().unwrap();
        let directory = workspace.root.join("fuzz");
        let manifest = std::fs::read_to_string(directory.join("Cargo.toml")).unwrap();
        let target = workspace.target.join("fuzz");
        let targets = Fuzzer {
            workspace: &workspace,
            directory: directory.clone(),
            target,
        }
        .targets()
        .unwrap();
        assert!(targets.len() >= 7, "{targets:?}");
        for target in targets {
            assert!(
                manifest.contains(&format!("path = \"fuzz_targets/{target}.rs\"")),
                "{target}"
            );
            let seeds = std::fs::read_dir(directory.join("seeds").join(&target));
            assert!(
                seeds.is_ok_and(|mut seeds| seeds.next().is_some()),
                "{target}"
            );
        }
    }
}
