//! Runs every test that this machine can run, and lists at the end the ones that it cannot run.

mod output;
mod parity;

use std::collections::BTreeSet;
use std::process::{Command, ExitStatus};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use output::{Binaries, Outcomes, Results};
use parity::Parity;

use crate::machine::{self, Finding};
use crate::workspace::Workspace;
use crate::{deploy, drivers, golden, shell};

/// Variable with the directory of the built drivers, for the tests.
pub(crate) const DRIVERS_DIR: &str = "NODEDOCK_DRIVERS_DIR";
/// The table of a kubelet's tests and the tests here that cover them.
const PARITY: &str = "tests/parity.md";
/// The suite that takes longest.
const LONGEST: &str = "conform";
/// The suite that computes all the time, and whose compilations have a deadline.
const ALONE: &str = "golden";

pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<()> {
    drivers::build(workspace)?;
    golden::build(workspace)?;
    build(workspace, args)?;
    if args.iter().all(|arg| arg == "--no-fail-fast") {
        return with_parity(workspace, || all(workspace, args));
    }
    let outcomes = tests(workspace, args, "");
    report_skipped(workspace);
    outcomes?;
    eprintln!("{PARITY} was not compared with this run, which does not run all tests");
    Ok(())
}

/// Checks that the tests in the table exist.
pub(crate) fn list(workspace: &Workspace) -> Result<()> {
    let args = ["--", "--list"].map(str::to_owned);
    build(workspace, &args)?;
    with_parity(workspace, || tests(workspace, &args, ""))
}

/// Checks that every test in the table exists, ran and passed; in a list, that it exists.
fn with_parity(workspace: &Workspace, tests: impl FnOnce() -> Result<Outcomes>) -> Result<()> {
    let text = std::fs::read_to_string(workspace.root.join(PARITY))
        .with_context(|| format!("reading {PARITY}"))?;
    let table = match Parity::parse(&text) {
        Ok(table) => table,
        Err(wrong) => bail!("{PARITY}:\n{}", wrong.join("\n")),
    };
    let outcomes = tests();
    report_skipped(workspace);
    let report = table.judge(&outcomes?);
    eprintln!("{report}");
    let broken = report.broken.join("\n");
    ensure!(
        broken.is_empty(),
        "{PARITY} does not agree with the tests:\n{broken}"
    );
    Ok(())
}

fn build(workspace: &Workspace, args: &[String]) -> Result<()> {
    shell::run(workspace.cargo().arg("build").args(programs(args)))
}

/// Runs all tests. The longest suite runs beside the others, most of which wait, and its lines begin with its name.
fn all(workspace: &Workspace, args: &[String]) -> Result<Outcomes> {
    let run =
        |selection: &[String], prefix: &str| tests(workspace, &[selection, args].concat(), prefix);
    let (beside, others) = thread::scope(|scope| {
        let beside = scope.spawn(|| run(&of_suite(LONGEST), &format!("{LONGEST} | ")));
        let others = run(&others(&workspace.suites), "");
        (beside.join().expect("it does not panic"), others)
    });
    let mut outcomes = others?;
    outcomes.extend(beside?);
    outcomes.extend(run(&of_suite(ALONE), "")?);
    // Cargo runs doc tests only by themselves where other tests are selected.
    outcomes.extend(run(&["--doc".to_owned()], "")?);
    Ok(outcomes)
}

fn of_suite(suite: &str) -> [String; 2] {
    ["--test".to_owned(), suite.to_owned()]
}

/// Returns what selects all tests but those of these two suites and doc tests.
fn others(suites: &BTreeSet<String>) -> Vec<String> {
    let suites = suites
        .iter()
        .filter(|suite| ![LONGEST, ALONE].contains(&suite.as_str()));
    ["--lib", "--bins"]
        .map(str::to_owned)
        .into_iter()
        .chain(suites.flat_map(|suite| of_suite(suite)))
        .collect()
}

fn tests(workspace: &Workspace, args: &[String], prefix: &str) -> Result<Outcomes> {
    let mut command = workspace.cargo();
    // The output is parsed here, so cargo must not add colours.
    command
        .env(DRIVERS_DIR, workspace.drivers_dir())
        .env("CARGO_TERM_COLOR", "never")
        .arg("test");
    if !chooses_package(args) {
        command.arg("--workspace");
    }
    command.args(args);
    let (status, outcomes) = watched(&mut command, prefix)?;
    ensure!(status.success(), "tests failed: {status}");
    Ok(outcomes)
}

/// Runs the tests on this terminal, and returns the outcome of each.
fn watched(command: &mut Command, prefix: &str) -> Result<(ExitStatus, Outcomes)> {
    let (mut results, mut binaries) = (Results::default(), Binaries::default());
    let status = shell::watched(
        command,
        prefix,
        |line| results.line(line),
        |line| binaries.line(line),
    )?;
    // A binary that does not compile has no results; the failure of the run is the better error then.
    let outcomes = results.named(binaries);
    Ok((
        status,
        if status.success() {
            outcomes?
        } else {
            outcomes.unwrap_or_default()
        },
    ))
}

/// The harness starts the real programs, which `cargo test` alone would not rebuild. Built together with the tests they share their
/// dependencies and have their fail points; built alone, other features of some dependencies would rebuild everything.
pub(crate) fn programs(args: &[String]) -> &'static [&'static str] {
    match chooses_package(args) {
        true => &[
            "-p",
            "nodedockd",
            "-p",
            "nodedock",
            "--features",
            "nodedockd/failpoints",
        ],
        false => &["--workspace", "--bins", "--tests"],
    }
}

fn chooses_package(args: &[String]) -> bool {
    let for_cargo = args.iter().take_while(|arg| *arg != "--");
    for_cargo
        .into_iter()
        .any(|arg| arg.starts_with("-p") || arg.starts_with("--package"))
}

fn report_skipped(workspace: &Workspace) {
    for (what, finding) in outside_software(workspace) {
        if let Finding::Missing(why) = finding {
            eprintln!("skipped: {what}: {why}");
        }
    }
}

/// External software, each with the tests that need it.
fn outside_software(workspace: &Workspace) -> Vec<(String, Finding)> {
    let own = [
        (
            "devices in real containers",
            machine::podman().map_or_else(Finding::Missing, |_| Finding::Present),
        ),
        ("packaged drivers as skopeo reads them", machine::skopeo()),
        (
            "Kubernetes, agents, kubelets and drivers written in Go",
            machine::go(),
        ),
        (
            "clients and plugins written in Python",
            machine::python_grpc(),
        ),
    ];
    let own = own.map(|(what, finding)| (what.to_owned(), finding));
    own.into_iter()
        .chain(golden::findings(workspace))
        .chain(deploy::findings(workspace))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn words(args: &[&str]) -> Vec<String> {
        args.iter().map(|arg| (*arg).to_owned()).collect()
    }

    /// Returns the packages of a build with these arguments, each with its features.
    fn packages(args: &[&str]) -> String {
        let workspace = Workspace::load().unwrap();
        let mut tree = workspace.cargo();
        tree.args([
            "tree",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p} [{f}]",
        ])
        .args(args);
        let output = tree.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn shipped_program_has_no_fail_points() {
        let has = |args: &[&str]| {
            packages(args)
                .lines()
                .any(|line| line.starts_with("fail v"))
        };
        assert!(
            has(&["-p", "nodedockd", "--features", "failpoints"]),
            "the question is the right one"
        );
        assert!(!has(&["-p", "nodedockd", "-p", "nodedock"]) && !has(&["--workspace"]));
    }

    /// External crates that only commands, templates and tests of drivers need.
    const OF_COMMANDS: [&str; 10] = [
        "clap_complete",
        "comfy-table",
        "include_dir",
        "oci-spec",
        "quick-junit",
        "shell-words",
        "similar",
        "toml",
        "wasi-preview1-component-adapter-provider",
        "wit-bindgen-core",
    ];

    /// Returns whether a line of `cargo tree` names a crate of commands, tests or drivers: one of those above, or of this workspace and not
    /// of the host.
    fn is_of_commands(line: &str, root: &Path) -> bool {
        let mut words = line.split(' ');
        let is_external = words.next().is_some_and(|name| OF_COMMANDS.contains(&name));
        let path = words.find_map(|word| word.strip_prefix('(')?.strip_suffix(')'));
        let directory = path.and_then(|path| Path::new(path).strip_prefix(root).ok());
        is_external
            || directory.is_some_and(|directory| {
                let is_host = directory.starts_with("host") || directory == Path::new("proto");
                !is_host
                    || ["host/author", "host/bindings", "host/cli"]
                        .iter()
                        .any(|of| directory == Path::new(of))
            })
    }

    /// Returns the crates of commands, tests or drivers in a program.
    fn crates_of_commands(program: &str) -> BTreeSet<String> {
        let root = Workspace::load().unwrap().root;
        packages(&["-p", program])
            .lines()
            .filter(|line| is_of_commands(line, &root))
            .map(|line| line.split(' ').take(1).collect())
            .collect()
    }

    /// The node program runs as root on every node.
    #[test]
    fn node_program_links_only_the_host() {
        let refused = crates_of_commands("nodedockd");
        assert!(
            refused.is_empty(),
            "nodedockd links {refused:?}, which belong to commands or tests: \
             `cargo tree -e normal -p nodedockd -i CRATE` shows the way"
        );
        let commands = crates_of_commands("nodedock");
        for name in ["nodedock-author", "nodedock-stand-ins", "similar"] {
            assert!(
                commands.contains(name),
                "the question is the right one: {name} is not in {commands:?}"
            );
        }
    }

    #[test]
    fn shipped_program_has_no_fuzzing_code() {
        let has = |args: &[&str]| {
            let fuzzed = |line: &str| line.starts_with("nodedock") && line.contains("fuzzing");
            packages(args).lines().any(fuzzed)
        };
        assert!(
            has(&["-p", "nodedockd", "--features", "fuzzing"]),
            "the question is the right one"
        );
        assert!(
            has(&["-p", "nodedock-proto", "--features", "fuzzing"]),
            "the question is the right one"
        );
        assert!(!has(&["-p", "nodedockd", "-p", "nodedock"]) && !has(&["--workspace"]));
    }

    #[test]
    fn every_suite_is_selected_once() {
        let suites = &Workspace::load().unwrap().suites;
        assert!([LONGEST, ALONE].iter().all(|suite| suites.contains(*suite)));
        let others = others(suites);
        assert!(
            others.starts_with(&words(&["--lib", "--bins", "--test"])),
            "{others:?}"
        );
        assert_eq!(others.len(), 2 + 2 * (suites.len() - 2));
    }

    #[test]
    fn a_chosen_package_replaces_the_workspace() {
        assert!(!chooses_package(&words(&["claims"])));
        assert!(chooses_package(&words(&["-p", "xtask"])));
        assert!(chooses_package(&words(&["--package=xtask"])));
        assert!(!chooses_package(&words(&["--", "-p"])));
    }
}
