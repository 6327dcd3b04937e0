//! `nodedock simulate`: many virtual nodes in one process, with real drivers on recorded machines and a real API server.
//!
//! Given driver files, snapshots and a kubeconfig, it publishes for every node the slices that a daemon would publish on that machine,
//! prepares the claims that are allocated there in memory, writes their statuses, and makes devices unhealthy by a script. There is no
//! kubelet, no container, no CDI file and no checkpoint. Nodes of one snapshot share its files, which nothing changes.

mod claims;
mod faults;
mod machine;
mod node;
mod slices;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use self::claims::ClaimCounts;
use self::faults::Script;
use self::machine::{DriverFiles, Machine};
use self::node::VirtualNode;
use self::slices::Published;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_kube::client::{ClientConfig, KubeClient, RequestRate};
use nodedock_kube::status::Statuses;
use nodedock_model::{ObjectName, limit};

/// Nodes whose devices are discovered at the same time: each call of a driver takes a core.
const DISCOVERIES: usize = 4;
/// Interval of looking at the progress.
const REPORT_PERIOD: Duration = Duration::from_secs(1);

pub(crate) struct Options {
    /// Names are `PREFIX-0` and so on.
    pub(crate) prefix: String,
    pub(crate) nodes: usize,
    /// Snapshots: at least one. Nodes use them in turn.
    pub(crate) snapshots: Vec<PathBuf>,
    /// Files as in the drivers directory of a daemon.
    pub(crate) drivers: PathBuf,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) faults: Option<PathBuf>,
    pub(crate) rate: RequestRate,
    /// Nodes that the API server does not have are created.
    pub(crate) creates_nodes: bool,
    /// Ends when all slices are written.
    pub(crate) ends_when_published: bool,
}

/// The nodes, by name.
type Nodes = Arc<BTreeMap<ObjectName, Arc<VirtualNode>>>;

/// Runs without end, unless the options say otherwise, and prints to standard output what has changed. It may be dropped at any time.
pub(crate) async fn run(options: Options) -> Result<()> {
    let script = options
        .faults
        .as_deref()
        .map(Script::read)
        .transpose()?
        .unwrap_or_default();
    let config = ClientConfig {
        kubeconfig: Some(options.kubeconfig.clone()),
        rate: options.rate,
    };
    let client = KubeClient::connect(config)
        .await
        .context("connect to the API server")?;
    let files = DriverFiles::all(&options.drivers)?;
    // Dropped at the end, and the machines with it.
    let directory = tempfile::tempdir().context("make a directory for the machines")?;
    let mut machines = Vec::with_capacity(options.snapshots.len());
    for (index, snapshot) in options.snapshots.iter().enumerate() {
        let made = directory.path().join(index.to_string());
        machines.push(Arc::new(
            Machine::load(snapshot, &made, directory.path(), &files).await?,
        ));
    }
    let name = |index| {
        let name = format!("{}-{index}", options.prefix);
        let name = ObjectName::new(&name).with_context(|| format!("name of a node {name:?}"))?;
        Ok(Arc::new(VirtualNode::new(
            name,
            Arc::clone(&machines[index % machines.len()]),
        )))
    };
    let nodes: Vec<_> = (0..options.nodes).map(name).collect::<Result<_>>()?;
    let started = Instant::now();
    let discovered =
        stream::iter(nodes.iter().map(Arc::clone)).map(|node| async move { node.discover().await });
    discovered
        .buffer_unordered(DISCOVERIES)
        .try_for_each(|()| async { Ok(()) })
        .await?;
    let nodes: Nodes = Arc::new(
        nodes
            .into_iter()
            .map(|node| (node.name.clone(), node))
            .collect(),
    );
    say(&format!(
        "{} nodes have {} devices, found in {:.1?}",
        nodes.len(),
        devices_of(&nodes),
        started.elapsed()
    ));

    let (tasks, conditions) = (Tasks::new(), Conditions::new(Changes::default()));
    client.keep_ready(&tasks);
    let publishing = slices::start(&nodes, &client, options.creates_nodes, &conditions, &tasks);
    let statuses = Statuses::start(
        &tasks,
        &client,
        conditions,
        // There are no pods that wait for a status.
        Arc::new(|_| {}),
        limit::STATUSES_MAX * nodes.len(),
    );
    let counts = Arc::<ClaimCounts>::default();
    let work = claims::run(client, Arc::clone(&nodes), statuses, Arc::clone(&counts));
    tasks.spawn_until_stopped("claims", work);
    let shown = show_until_published(&publishing, &counts, started).await;
    if options.ends_when_published {
        return Ok(());
    }
    tasks.spawn_until_stopped("faults", faults::run(script, nodes));
    show(&publishing, &counts, shown).await
}

/// Writes a line; nothing is lost if there is no reader.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

fn devices_of(nodes: &Nodes) -> usize {
    nodes.values().map(|node| node.device_count()).sum()
}

/// The state that is shown when it has changed.
#[derive(PartialEq, Eq)]
struct Progress {
    published: Published,
    prepared: u64,
    refused: u64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Published {
            pools,
            of,
            devices,
            slices,
        } = self.published;
        write!(
            f,
            "{pools} of {of} pools published with {devices} devices in {slices} slices"
        )?;
        write!(
            f,
            ", {} claims prepared, {} refused",
            self.prepared, self.refused
        )
    }
}

fn progress(publishing: &slices::Publishing, counts: &ClaimCounts) -> Progress {
    let (prepared, refused) = counts.now();
    Progress {
        published: publishing.progress(),
        prepared,
        refused,
    }
}

/// Shows the state as it changes; returns the last one shown.
async fn show_until_published(
    publishing: &slices::Publishing,
    counts: &ClaimCounts,
    started: Instant,
) -> Progress {
    let mut timer = tokio::time::interval(REPORT_PERIOD);
    let mut shown = None;
    loop {
        timer.tick().await;
        let now = progress(publishing, counts);
        let is_complete = now.published.pools == now.published.of;
        if shown.as_ref() != Some(&now) {
            say(&now.to_string());
        }
        if is_complete {
            say(&format!("all published after {:.1?}", started.elapsed()));
            return now;
        }
        shown = Some(now);
    }
}

/// Shows the state as it changes from the one already shown: what changes between the two displays is shown, too.
async fn show(publishing: &slices::Publishing, counts: &ClaimCounts, mut shown: Progress) -> ! {
    let mut timer = tokio::time::interval(REPORT_PERIOD);
    loop {
        timer.tick().await;
        let now = progress(publishing, counts);
        if now != shown {
            say(&now.to_string());
            shown = now;
        }
    }
}
