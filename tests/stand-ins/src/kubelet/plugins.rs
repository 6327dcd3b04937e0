//! The plugin watcher and the plugin manager: from sockets in a directory to registered plugins.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use nodedock_proto::kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use notify::event::{ModifyKind, RenameMode};
use notify::{Event, EventKind, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Channel;

use super::state::Inner;
use super::{authority, devices, dra};

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
pub(super) fn watch(inner: &Arc<Inner>, end: &CancellationToken, tasks: &TaskTracker) {
    let dir = inner.root.join("plugins_registry");
    let (sender, events) = mpsc::unbounded_channel();
    let mut watcher = notify::recommended_watcher(move |event| {
        // The receiver ends with the kubelet.
        let _ = sender.send(event);
    })
    .expect("directories can be watched");
    // Before it is walked, so that nothing is missed.
    watcher.watch(&dir, RecursiveMode::Recursive).expect("the plugins' directory can be watched");
    let mut found = vec![];
    walk(&dir, &mut found);
    tasks.spawn(follow(Arc::clone(inner), found, events, watcher, end.clone(), tasks.clone()));
}

async fn follow(
    inner: Arc<Inner>,
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
        let work = work(Arc::clone(&inner), path.clone(), gone.clone(), end.clone(), before);
        workers.insert(path, Worker { gone, ended: tasks.spawn(work) });
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
                    found.into_iter().for_each(|socket| start(&mut workers, socket));
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
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// The sockets at a path and below it.
fn walk(path: &Path, found: &mut Vec<PathBuf>) {
    let Ok(kind) = std::fs::metadata(path).map(|metadata| metadata.file_type()) else { return };
    if kind.is_socket() {
        found.push(path.to_owned());
    } else if kind.is_dir() {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        entries.sort();
        entries.iter().filter(|entry| !is_hidden(entry)).for_each(|entry| walk(entry, found));
    }
}

/// Registers what is at a socket, again and again until it works, and deregisters it when the socket is gone. What has begun is
/// ended first, but when the kubelet ends.
async fn work(
    inner: Arc<Inner>,
    path: PathBuf,
    gone: CancellationToken,
    end: CancellationToken,
    before: Option<Worker>,
) {
    if let Some(before) = before {
        before.gone.cancel();
        let _ = before.ended.await;
    }
    let mut pause = inner.options.register_again;
    let plugin = loop {
        if gone.is_cancelled() {
            return;
        }
        let registered = tokio::select! {
            () = end.cancelled() => return,
            registered = register(&inner, &path) => registered,
        };
        match registered {
            Ok(plugin) => break plugin,
            Err(error) => inner.note_outcome("register", &path.display().to_string(), Err(error)),
        }
        tokio::select! {
            () = gone.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(inner.options.register_again_most);
    };
    inner.note_quietly("register", &path.display().to_string());
    gone.cancelled().await;
    if !end.is_cancelled() {
        plugin.deregister(&inner);
    }
}

/// A plugin that its handler has taken.
enum Registered {
    Dra { driver: String, number: u64 },
    Devices { resource: String, number: u64 },
}

impl Registered {
    fn deregister(self, inner: &Arc<Inner>) {
        match self {
            Self::Dra { driver, number } => dra::deregister(inner, &driver, number),
            Self::Devices { resource, number } => devices::disconnect(inner, &resource, number),
        }
    }
}

async fn register(inner: &Arc<Inner>, path: &Path) -> Result<Registered, String> {
    let options = &inner.options;
    let stream = authority::dial(path, options.dial_timeout).await?;
    let mut client = RegistrationClient::new(authority::channel_by_path(path, stream).await?);
    let whom = path.display().to_string();
    let asking = client.get_info(InfoRequest {});
    let info = inner.call("GetInfo", &whom, options.get_info_timeout, asking).await?.into_inner();
    let registered = match handle(inner, path, &info).await {
        Ok(registered) => registered,
        Err(why) => {
            // If the plugin could not be notified, the error of the registration says so.
            let notified = notify(inner, &mut client, &info.name, Err(&why)).await;
            return Err(notified.err().map_or(why.clone(), |error| format!("{why}; {error}")));
        }
    };
    match notify(inner, &mut client, &info.name, Ok(())).await {
        Ok(()) => {
            if let Registered::Dra { driver, number } = &registered {
                dra::notified(inner, driver, *number);
            }
            Ok(registered)
        }
        Err(error) => {
            registered.deregister(inner);
            Err(error)
        }
    }
}

async fn notify(
    inner: &Inner,
    client: &mut RegistrationClient<Channel>,
    name: &str,
    outcome: Result<(), &str>,
) -> Result<(), String> {
    let status = RegistrationStatus {
        plugin_registered: outcome.is_ok(),
        error: outcome.err().unwrap_or_default().to_owned(),
    };
    let telling = client.notify_registration_status(status);
    inner.call("NotifyRegistrationStatus", name, inner.options.notify_timeout, telling).await.map(drop)
}

/// Hands a plugin to the manager of its type.
async fn handle(inner: &Arc<Inner>, path: &Path, info: &PluginInfo) -> Result<Registered, String> {
    let endpoint = match info.endpoint.as_str() {
        "" => path.to_owned(),
        endpoint => PathBuf::from(endpoint),
    };
    match info.r#type.as_str() {
        "DRAPlugin" => {
            let chosen = dra::validate(inner, &info.name, &endpoint, &info.supported_versions)
                .map_err(|why| format!("plugin validation failed with err: {why}"))?;
            let number = dra::register(inner, &info.name, endpoint, &chosen, &info.supported_versions)
                .map_err(|why| format!("plugin registration failed with err: {why}"))?;
            Ok(Registered::Dra { driver: info.name.clone(), number })
        }
        "DevicePlugin" => {
            devices::validate(&info.name, &info.supported_versions)
                .map_err(|why| format!("plugin validation failed with err: {why}"))?;
            let number = devices::connect(inner, &info.name, &endpoint)
                .await
                .map_err(|why| format!("plugin registration failed with err: {why}"))?;
            Ok(Registered::Devices { resource: info.name.clone(), number })
        }
        other => Err(format!("no handler registered for plugin type: {other} at socket {}", path.display())),
    }
}
