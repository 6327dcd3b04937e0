//! Checks whether a device driver behaves as a kubelet and a cluster need it.
//!
//! The driver is a black box: a program that is started on directories and an API server of its own for each case, or one that runs
//! already. The cases are in `cases.yaml`, in words; this crate has the code of each. Of the host it knows the rules of names: a WebAssembly driver is
//! checked as what the daemon makes of it, a plugin on a socket.

mod cases;
mod daemon;
mod device_plugin;
mod files;
mod list;
mod metrics;
mod mounts;
mod process;
mod published;
mod report;
mod schedule;
mod test_node;
mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use tokio::sync::Mutex;

pub use daemon::DaemonSockets;
pub use list::{Case, CaseError, Level, cases};
pub use report::{CaseResult, Outcome, Report};

use schedule::Schedule;
use test_node::TestNode;

/// Cases that run side by side of a driver that shares nothing between its instances: most of a case is waiting.
pub const SIDE_BY_SIDE: usize = 4;
/// A driver that answers each call in time may still be too slow.
const CASE_MAX: Duration = Duration::from_secs(600);

/// The driver under test.
#[derive(Debug, Clone)]
pub enum Target {
    /// It is started for each case.
    Program(Program),
    /// A DRA driver that runs already, or is started by hand.
    Running(Running),
}

/// A DRA driver that others start.
#[derive(Debug, Clone)]
pub struct Running {
    /// A kubelet's directory: `plugins_registry`, with the driver's registration sockets, is below it.
    pub kubelet: PathBuf,
    /// Path of the kubeconfig to write for the API server that has the claims. A driver that reads claims is started after it is written.
    pub kubeconfig: Option<PathBuf>,
}

/// A program and what it is started with. `{NAME}` in an argument is replaced: see [`PLACEHOLDERS`].
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// The program and its arguments; at least one.
    pub command: Vec<String>,
    /// It offers the health service whether or not it has something to say, as the daemon does for every driver.
    pub health_may_be_silent: bool,
    /// It is a daemon that runs the driver.
    pub daemon: Option<DaemonSockets>,
    /// Files to be there before it starts: the path below the root, and the content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

/// Names that a command may contain as `{NAME}`, and the meaning of each.
pub const PLACEHOLDERS: [(&str, &str); 12] = [
    ("root", "a directory below which everything is"),
    ("kubelet", "the kubelet's directory"),
    ("plugins", "the kubelet's directory of plugins' data"),
    ("registry", "the directory of registration sockets"),
    (
        "device-plugins",
        "the directory of kubelet.sock and of device plugins' sockets",
    ),
    ("cdi", "the CDI directory"),
    ("state", "a directory that outlives restarts"),
    ("kubeconfig", "the path of a kubeconfig for the API server"),
    ("api", "the URL of the API server"),
    ("node", "the name of the node"),
    ("boot", "the ID of the boot, which a reboot changes"),
    ("instance", "a UID of the instance, for rolling updates"),
];

impl Program {
    /// Reads a command line: words with the quotes of a shell, and no shell.
    ///
    /// # Errors
    ///
    /// A quote that is not closed, an empty line, or a name in braces that is no placeholder.
    pub fn parse(line: &str) -> Result<Self> {
        let command =
            shell_words::split(line).context("the command has a quote that is not closed")?;
        if command.is_empty() {
            bail!("the command is empty");
        }
        let program = Self {
            command,
            ..Self::default()
        };
        for name in program.command.iter().flat_map(|word| placeholders(word)) {
            if !PLACEHOLDERS.iter().any(|(known, _)| *known == name) {
                let known: Vec<_> = PLACEHOLDERS.iter().map(|(known, _)| *known).collect();
                bail!(
                    "{{{name}}} is no placeholder: the command may have {{{}}}",
                    known.join("}, {")
                );
            }
        }
        Ok(program)
    }

    fn names(&self, placeholder: &str) -> bool {
        self.command
            .iter()
            .any(|word| placeholders(word).any(|name| name == placeholder))
    }
}

/// The names in braces of a word.
fn placeholders(word: &str) -> impl Iterator<Item = &str> {
    let in_braces = word
        .split('{')
        .skip(1)
        .filter_map(|part| part.split_once('}'));
    in_braces.map(|(name, _)| name).filter(move |name| {
        !name.is_empty()
            && name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    })
}

/// The driver to run and the options of the run.
#[derive(Debug, Clone)]
pub struct Options {
    pub target: Target,
    /// The driver's name, if it is to be this one.
    pub driver: Option<String>,
    /// Pools and devices of a driver that publishes no slices.
    pub devices: Vec<(String, String)>,
    /// Opaque parameters of every claim.
    pub parameters: Option<Value>,
    /// The driver says that it knows claims with admin access.
    pub admin_access: bool,
    /// Time for a driver to register.
    pub start_timeout: Duration,
    /// Deadline of each call.
    pub call_timeout: Duration,
    /// Time for a driver to publish its slices.
    pub slices_timeout: Duration,
    /// IDs of cases, or levels; empty: all.
    pub only: Vec<String>,
    /// Cases of a program that run at the same time, each with a driver of its own: more than one only if the program takes nothing of the
    /// machine that another instance takes too, such as a port or a device. A driver that runs already has one at a time.
    pub jobs: usize,
}

impl Options {
    /// The defaults: 30 s to register, 45 s for a call as a kubelet has it, 30 s for slices, one case after the other.
    pub fn new(target: Target) -> Self {
        Self {
            target,
            driver: None,
            devices: Vec::new(),
            parameters: None,
            admin_access: false,
            start_timeout: Duration::from_secs(30),
            call_timeout: Duration::from_secs(45),
            slices_timeout: Duration::from_secs(30),
            only: Vec::new(),
            jobs: 1,
        }
    }

    fn jobs(&self) -> usize {
        match self.target {
            Target::Program(_) => self.jobs.max(1),
            Target::Running(_) => 1,
        }
    }
}

/// Runs the cases, `jobs` at a time if the driver is a program, and `progress` with each result in the order of the list.
///
/// # Errors
///
/// The list of cases and their code do not agree, `only` names no case, or this machine has no room for a driver: a directory or a socket
/// cannot be made. What the driver does wrong is in the report.
pub async fn run(options: &Options, mut progress: impl FnMut(&CaseResult)) -> Result<Report> {
    let list = cases().context("the list of cases")?;
    let code: BTreeMap<_, _> = cases::all().into_iter().collect();
    list::check(&list, code.keys().copied())?;
    if let Some(unknown) = options
        .only
        .iter()
        .find(|only| !list.iter().any(|case| case.is_named(only)))
    {
        bail!("{unknown} is neither a case nor a level");
    }
    let mut report = Report::default();
    let nodes = Nodes::new(options);
    let mut node = nodes.take().await?;
    let facts = cases::Facts::learn(&mut node).await;
    nodes.put_back(node).await;
    let wanted = list
        .iter()
        .filter(|case| is_wanted(case, &list, &options.only));
    let mut schedule = Schedule::new(wanted, options.jobs() > 1);
    let (mut running, mut ended) = (FuturesUnordered::new(), BTreeMap::new());
    loop {
        while running.len() < options.jobs()
            && let Some((place, case)) = schedule.begin()
        {
            let run = *code.get(case.id.as_str()).context("a case without code")?;
            let missing = facts.missing(case).or_else(|| schedule.blocks(case));
            let outcome = result(case, run, &nodes, &facts, missing);
            running.push(async move { (place, outcome.await) });
        }
        let Some((place, result)) = running.next().await else {
            break;
        };
        let result = result?;
        schedule.end(place, &result.outcome);
        ended.insert(place, result);
        while let Some(result) = ended.remove(&report.verdicts.len()) {
            report.add(result, &mut progress);
        }
    }
    Ok(report)
}

/// Runs a case, unless it has an outcome without that.
async fn result(
    case: &Case,
    run: cases::Run,
    nodes: &Nodes<'_>,
    facts: &cases::Facts,
    missing: Option<Outcome>,
) -> Result<CaseResult> {
    let began = Instant::now();
    let (outcome, messages) = match missing {
        Some(outcome) => (outcome, Vec::new()),
        None => {
            let mut node = nodes.take().await?;
            let outcome = match tokio::time::timeout(CASE_MAX, run(&mut node, facts)).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
                Err(_) => Outcome::Failed(format!("the case did not end within {CASE_MAX:?}")),
            };
            let messages = match outcome {
                Outcome::Failed(_) => node.messages(),
                _ => Vec::new(),
            };
            nodes.put_back(node).await;
            (outcome, messages)
        }
    };
    Ok(CaseResult {
        case: case.clone(),
        outcome,
        took: began.elapsed(),
        messages,
    })
}

/// The source of each case's node.
struct Nodes<'a> {
    options: &'a Options,
    /// That of a driver that runs already: it knows the API server that it was started with. One case at a time has it.
    shared: Mutex<Option<TestNode>>,
}

impl<'a> Nodes<'a> {
    fn new(options: &'a Options) -> Self {
        Self {
            options,
            shared: Mutex::new(None),
        }
    }

    async fn take(&self) -> Result<TestNode> {
        if let Some(node) = self.shared.lock().await.take() {
            return Ok(node);
        }
        TestNode::new(self.options).await
    }

    async fn put_back(&self, mut node: TestNode) {
        match self.options.target {
            Target::Running(_) => {
                node.release().await;
                *self.shared.lock().await = Some(node);
            }
            Target::Program(_) => node.kill().await,
        }
    }
}

/// Returns whether a case is named, or needed by one that is.
fn is_wanted(case: &Case, list: &[Case], only: &[String]) -> bool {
    only.is_empty()
        || is_named(case, only)
        || list
            .iter()
            .any(|other| is_named(other, only) && other.needs(case, list))
}

fn is_named(case: &Case, only: &[String]) -> bool {
    only.iter().any(|only| case.is_named(only))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braced_names_are_placeholders_unlike_json() {
        let found = |word| placeholders(word).collect::<Vec<_>>();
        assert_eq!(
            found("--a={state}/b/{device-plugins}"),
            ["state", "device-plugins"]
        );
        assert_eq!(found(r#"{"a": {"b": 1}} {} {A} {open"#), Vec::<&str>::new());
    }
}
