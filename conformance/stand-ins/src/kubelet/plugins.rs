//! The plugin watcher and the plugin manager: from sockets in a directory to registered plugins.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use nodedock_proto::kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use notify::event::{ModifyKind, RenameMode};
use notify::{Event, EventKind, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Channel;

use super::state::Shared;
use super::{authority, dra};

const GET_INFO: Duration = Duration::from_secs(1);
/// The longest pause after a registration that failed.
const REGISTER_AGAIN_MOST: Duration = Duration::from_secs(122);
const NOTIFY: Duration = Duration::from_secs(5);

/// A task for one socket that appeared, which ends when the socket goes.
struct Worker {
    gone: CancellationToken,
    ended: tokio::task::JoinHandle<()>,
}

/// Follows `plugins_registry`.
///
/// # Panics
///
/// If the directory cannot be watched.
pub(super) fn watch(shared: &Arc<Shared>, end: &CancellationToken, tasks: &TaskTracker) {
    let dir = shared.root.join("plugins_registry");
    let (sender, events) = mpsc::unbounded_channel();
    let mut watcher = notify::recommended_watcher(move |event| {
        // The receiver ends with the kubelet.
        let _ = sender.send(event);
    })
    .expect("directories can be watched");
    // Before it is walked, so that nothing is missed.
    watcher
        .watch(&dir, RecursiveMode::Recursive)
        .expect("the plugins' directory can be watched");
    let mut found = vec![];
    walk(&dir, &mut found);
    tasks.spawn(follow(
        Arc::clone(shared),
        found,
        events,
        watcher,
        end.clone(),
        tasks.clone(),
    ));
}

async fn follow(
    shared: Arc<Shared>,
    found: Vec<PathBuf>,
    mut events: mpsc::UnboundedReceiver<notify::Result<Event>>,
    watcher: notify::RecommendedWatcher,
    end: CancellationToken,
    tasks: TaskTracker,
) {
    let mut workers = HashMap::new();
    let start = |workers: &mut HashMap<PathBuf, Worker>, path: PathBuf| {
        let before = workers.remove(&path);
        let gone = end.child_token();
        let work = work(
            Arc::clone(&shared),
            path.clone(),
            gone.clone(),
            end.clone(),
            before,
        );
        workers.insert(
            path,
            Worker {
                gone,
                ended: tasks.spawn(work),
            },
        );
    };
    for socket in found {
        start(&mut workers, socket);
    }
    loop {
        let event = tokio::select! {
            () = end.cancelled() => break,
            event = events.recv() => event,
        };
        let Some(Ok(event)) = event else { continue };
        for path in event.paths {
            match event.kind {
                EventKind::Create(_) | EventKind::Modify(ModifyKind::Name(RenameMode::To)) => {
                    if is_hidden(&path) {
                        continue;
                    }
                    let mut found = vec![];
                    walk(&path, &mut found);
                    // A file that appears again is a new one, known or not.
                    found
                        .into_iter()
                        .for_each(|socket| start(&mut workers, socket));
                }
                EventKind::Remove(_) => {
                    if let Some(worker) = workers.get(&path) {
                        worker.gone.cancel();
                    }
                }
                _ => {}
            }
        }
    }
    drop(watcher);
}

fn is_hidden(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// The sockets at a path and below it.
fn walk(path: &Path, found: &mut Vec<PathBuf>) {
    // no error: a path that went away meanwhile has no socket
    let Ok(kind) = std::fs::metadata(path).map(|metadata| metadata.file_type()) else {
        return;
    };
    if kind.is_socket() {
        found.push(path.to_owned());
    } else if kind.is_dir() {
        // no error: the same of a directory; the watch reports what is made later
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        entries.sort();
        entries
            .iter()
            .filter(|entry| !is_hidden(entry))
            .for_each(|entry| walk(entry, found));
    }
}

/// Registers what is at a socket, again and again until it works, and deregisters it when the socket is gone. What has begun is
/// ended first, but when the kubelet ends.
async fn work(
    shared: Arc<Shared>,
    path: PathBuf,
    gone: CancellationToken,
    end: CancellationToken,
    before: Option<Worker>,
) {
    if let Some(before) = before {
        before.gone.cancel();
        let _ = before.ended.await;
    }
    let mut pause = shared.options.register_again;
    let (driver, number) = loop {
        if gone.is_cancelled() {
            return;
        }
        let registered = tokio::select! {
            () = end.cancelled() => return,
            registered = register(&shared, &path) => registered,
        };
        match registered {
            Ok(registered) => break registered,
            Err(error) => shared.note_outcome("register", &path.display().to_string(), Err(error)),
        }
        tokio::select! {
            () = gone.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(REGISTER_AGAIN_MOST);
    };
    shared.note_quietly("register", &path.display().to_string());
    gone.cancelled().await;
    if !end.is_cancelled() {
        dra::deregister(&shared, &driver, number);
    }
}

/// Registers the driver at a socket. Gives its name and the number of this instance.
async fn register(shared: &Arc<Shared>, path: &Path) -> Result<(String, u64), String> {
    let stream = authority::dial(path, shared.options.dial_timeout).await?;
    let (channel, _) = authority::channel(stream, authority::of_path(path)).await?;
    let mut client = RegistrationClient::new(channel);
    let asking = client.get_info(InfoRequest {});
    let info = shared
        .call("GetInfo", &path.display().to_string(), GET_INFO, asking)
        .await?
        .into_inner();
    let number = match handle(shared, &info) {
        Ok(number) => number,
        Err(why) => {
            // If the plugin could not be notified, the error of the registration says so.
            let notified = notify(shared, &mut client, &info.name, Err(&why)).await;
            return Err(notified
                .err()
                .map_or(why.clone(), |error| format!("{why}; {error}")));
        }
    };
    match notify(shared, &mut client, &info.name, Ok(())).await {
        Ok(()) => {
            dra::notified(shared, &info.name, number);
            Ok((info.name, number))
        }
        Err(error) => {
            dra::deregister(shared, &info.name, number);
            Err(error)
        }
    }
}

async fn notify(
    shared: &Shared,
    client: &mut RegistrationClient<Channel>,
    name: &str,
    outcome: Result<(), &str>,
) -> Result<(), String> {
    let status = RegistrationStatus {
        plugin_registered: outcome.is_ok(),
        error: outcome.err().unwrap_or_default().to_owned(),
    };
    let telling = client.notify_registration_status(status);
    shared
        .call("NotifyRegistrationStatus", name, NOTIFY, telling)
        .await
        .map(drop)
}

/// Takes a DRA driver. Gives the number of this instance.
fn handle(shared: &Arc<Shared>, info: &PluginInfo) -> Result<u64, String> {
    if info.r#type != "DRAPlugin" {
        return Err(format!(
            "no handler registered for plugin type: {}",
            info.r#type
        ));
    }
    let endpoint = PathBuf::from(&info.endpoint);
    dra::validate(&info.name, &endpoint, &info.supported_versions)
        .map_err(|why| format!("plugin validation failed with err: {why}"))?;
    dra::register(shared, &info.name, endpoint)
        .map_err(|why| format!("plugin registration failed with err: {why}"))
}
