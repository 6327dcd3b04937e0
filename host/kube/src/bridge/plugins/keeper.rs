//! The keeper of one resource: its socket in the kubelet's folder, and its registration.
//!
//! The kubelet deletes every socket of the folder when it starts, and then makes its own: the socket is bound anew before each
//! registration if it is gone. What the folder's watch tells only wakes the keeper; what stands there it looks at itself.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_server::DevicePluginServer;
use nodedock_proto::unix;
use tokio::sync::watch;
use tokio::time::Instant;

use super::counters::Counters;
use super::face::Face;
use super::register::{self, RegisterError};
use super::socket;
use super::standing::{Standing, Step};
use nodedock_base::conditions::Conditions;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets, socket_id};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, Problem, limit};

/// The code of the condition of a resource that a kubelet does not take.
pub(super) const REFUSED: &str = "device-plugin-refused";
/// The code of the condition that no kubelet takes registrations; its subject is the socket.
pub(super) const AWAY: &str = "kubelet-away";

/// How a resource stands with the kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Registration {
    /// Not registered, or the kubelet does not follow the list: no kubelet was reached, or it is about to ask. Why, if it is known.
    #[default]
    Waiting,
    Unreached(String),
    /// The kubelet's words.
    Refused(String),
    /// Registered, and the kubelet follows the list.
    Followed,
    /// A newer instance of ours offers the resource.
    Superseded,
}

impl Registration {
    /// A kubelet has said what it makes of it.
    pub fn is_settled(&self) -> bool {
        match self {
            Self::Waiting | Self::Unreached(_) => false,
            Self::Refused(_) | Self::Followed | Self::Superseded => true,
        }
    }
}

/// What the keepers of all resources share.
pub(super) struct Home {
    pub(super) folder: PathBuf,
    pub(super) conditions: Conditions,
    pub(super) counters: Arc<Counters>,
    /// Resources of which it was said that no kubelet takes them; while there are any it is said.
    pub(super) away: Mutex<BTreeSet<ExtendedResource>>,
}

impl Home {
    fn kubelet(&self) -> PathBuf {
        self.folder.join(KUBELET_SOCKET)
    }

    fn is_away(&self, resource: &ExtendedResource, message: String) {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        away.insert(resource.clone());
        self.conditions.set(&self.kubelet().display().to_string(), Problem::unavailable(AWAY, message));
    }

    fn is_here(&self, resource: &ExtendedResource) {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        if away.remove(resource) && away.is_empty() {
            self.conditions.clear(AWAY, &self.kubelet().display().to_string());
        }
    }
}

/// A socket that is served.
struct Bound {
    id: SocketId,
    tasks: Tasks,
}

pub(super) struct Keeper {
    home: Arc<Home>,
    resource: ExtendedResource,
    /// Of our socket.
    name: String,
    face: Face,
    seen: watch::Receiver<Arc<Sockets>>,
    tasks: Tasks,
    registration: Arc<Mutex<Registration>>,
    standing: Standing,
    bound: Option<Bound>,
    /// Since when the kubelet does not follow the list, and why as far as it is known.
    away: Option<(Instant, String)>,
    refused: bool,
}

impl Keeper {
    pub(super) fn new(
        home: Arc<Home>,
        resource: ExtendedResource,
        name: String,
        face: Face,
        seen: watch::Receiver<Arc<Sockets>>,
        registration: Arc<Mutex<Registration>>,
    ) -> Self {
        let tasks = face.tasks.clone();
        Self {
            home,
            resource,
            name,
            face,
            seen,
            tasks,
            registration,
            standing: Standing::default(),
            bound: None,
            away: None,
            refused: false,
        }
    }

    /// Until its tasks stop, which ends the lists and takes the socket away.
    pub(super) async fn run(mut self) {
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        let mut following = self.face.following.subscribe();
        loop {
            self.seen.mark_unchanged();
            let (lists, now) = (*following.borrow_and_update(), Instant::now());
            self.standing.follows(lists, now);
            let kubelet = socket_id(&self.home.kubelet());
            let superseded = self.is_superseded(kubelet.as_ref(), lists).await;
            let step = self.standing.step(kubelet.as_ref(), superseded, now);
            self.say(kubelet.as_ref(), lists, superseded, now);
            let until = match step {
                Step::Register => {
                    let (mut seen, path) = (self.seen.clone(), self.home.kubelet());
                    tokio::select! {
                        // A kubelet that took it meanwhile sees the end of the list.
                        () = &mut stopped => break,
                        () = another(&mut seen, &path, kubelet) => {}
                        () = self.register() => {}
                    }
                    continue;
                }
                Step::Wait(at) => Some(at),
                Step::Rest => None,
            };
            let until = [until, self.said_at()].into_iter().flatten().min();
            tokio::select! {
                // What is registered ends with the list.
                () = &mut stopped => break,
                // Whichever it was, the next turn looks at everything.
                changed = self.seen.changed() => if changed.is_err() { break },
                changed = following.changed() => if changed.is_err() { break },
                () = sleep_until(until) => {}
            }
        }
        self.end().await;
    }

    async fn is_superseded(&self, kubelet: Option<&SocketId>, lists: usize) -> bool {
        let Some(bound) = &self.bound else { return false };
        if lists > 0 || !self.standing.is_registered_at(kubelet) {
            return false;
        }
        let newer = socket::newer(&self.seen.borrow(), &self.resource, &self.name, &bound.id);
        for name in newer {
            let path = self.home.folder.join(name);
            if tokio::time::timeout(limit::LIST_LOST, socket::is_alive(&path)).await.unwrap_or(false) {
                return true;
            }
        }
        false
    }

    async fn register(&mut self) {
        if let Err(problem) = self.bind().await {
            tracing::debug!(resource = %self.resource, %problem, "no socket for the kubelet");
            self.tried_in_vain(socket_id(&self.home.kubelet()), problem.message, false);
            return;
        }
        let kubelet = self.home.kubelet();
        match register::register(&kubelet, &self.resource, &self.name).await {
            Ok(id) => {
                let lists = *self.face.following.borrow();
                self.standing.registered(id, lists > 0, Instant::now());
                self.home.counters.registered(&self.resource);
                tracing::info!(resource = %self.resource, socket = self.name, "registered with the kubelet");
                self.refused_no_more();
                self.away = Some((Instant::now(), "it does not ask for the list of devices".to_owned()));
            }
            Err((id, error)) => {
                let refusal = error.is_refusal();
                let words = match &error {
                    RegisterError::Refused { .. } | RegisterError::Deadline => error.to_string(),
                    _ => chain(&error),
                };
                self.tried_in_vain(id, words, refusal);
            }
        }
    }

    fn tried_in_vain(&mut self, kubelet: Option<SocketId>, why: String, refusal: bool) {
        let now = Instant::now();
        if let Some(kubelet) = kubelet {
            self.standing.failed(kubelet, now);
        }
        if refusal {
            self.home.counters.refused(&self.resource);
            self.refused = true;
            let message = format!("the kubelet does not take the extended resource {}: {why}", self.resource);
            self.home.conditions.set(self.resource.as_str(), Problem::unavailable(REFUSED, message));
            self.set(Registration::Refused(why));
            return;
        }
        self.refused_no_more();
        let since = self.away.take().map_or(now, |(since, _)| since);
        self.set(Registration::Unreached(why.clone()));
        self.away = Some((since, why));
    }

    fn refused_no_more(&mut self) {
        if std::mem::take(&mut self.refused) {
            self.home.conditions.clear(REFUSED, self.resource.as_str());
        }
    }

    /// Sees to it that our socket is there and served.
    async fn bind(&mut self) -> Result<(), Problem> {
        let path = self.home.folder.join(&self.name);
        if self.bound.as_ref().is_some_and(|bound| socket_id(&path) == Some(bound.id)) {
            return Ok(());
        }
        if let Some(old) = self.bound.take() {
            // Whoever was connected by it is gone, or comes again by the new one.
            old.tasks.stop();
        }
        let failed = |why: String| Problem::unavailable("device-plugin-socket", why);
        let listener = nodedock_base::socket::bind(&path).await.map_err(|error| failed(chain(&error)))?;
        let id = socket_id(&path).ok_or_else(|| failed(format!("{} was removed at once", path.display())))?;
        let tasks = self.tasks.child();
        let face = Face { tasks: tasks.clone(), ..self.face.clone() };
        let (stopped, resource) = (tasks.stopped(), self.resource.clone());
        tasks.spawn("device-plugin-face", async move {
            let server = tonic::transport::Server::builder().add_service(DevicePluginServer::new(face));
            let served = server.serve_with_incoming_shutdown(unix::incoming(listener), stopped).await;
            if let Err(error) = served {
                tracing::error!(%resource, error = chain(&error), "the device plugin's socket ended");
            }
        });
        self.bound = Some(Bound { id, tasks });
        Ok(())
    }

    /// Keeps the words about how it stands with the kubelet true.
    fn say(&mut self, kubelet: Option<&SocketId>, lists: usize, superseded: bool, now: Instant) {
        if lists > 0 || superseded {
            self.away = None;
            self.home.is_here(&self.resource);
            self.set(if lists > 0 { Registration::Followed } else { Registration::Superseded });
            return;
        }
        if kubelet.is_none() {
            self.refused_no_more();
            let since = self.away.take().map_or(now, |(since, _)| since);
            self.away = Some((since, "it is not there".to_owned()));
        }
        if self.refused {
            return;
        }
        let (since, why) = self.away.get_or_insert_with(|| (now, "it has not been tried yet".to_owned()));
        if now >= *since + limit::KUBELET_AWAY {
            let socket = self.home.kubelet().display().to_string();
            let message = format!(
                "no kubelet takes device plugins at {socket} ({why}): the extended resources of drivers are not offered to it"
            );
            self.home.is_away(&self.resource, message);
        }
        let registration = self.registration();
        if matches!(registration, Registration::Followed | Registration::Superseded) {
            self.set(Registration::Waiting);
        }
    }

    /// When something is to be said that is not said yet.
    fn said_at(&self) -> Option<Instant> {
        let (since, _) = self.away.as_ref().filter(|_| !self.refused)?;
        let at = *since + limit::KUBELET_AWAY;
        (at > Instant::now()).then_some(at)
    }

    fn registration(&self) -> Registration {
        self.registration.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, registration: Registration) {
        *self.registration.lock().unwrap_or_else(PoisonError::into_inner) = registration;
    }

    /// Takes our socket away, but not one that somebody else put there, and lets calls end.
    async fn end(self) {
        self.home.conditions.clear(REFUSED, self.resource.as_str());
        self.home.is_here(&self.resource);
        let Some(bound) = self.bound else { return };
        let path = self.home.folder.join(&self.name);
        if socket_id(&path) == Some(bound.id)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(socket = %path.display(), %error, "our socket stays in the kubelet's folder");
        }
        if !bound.tasks.drain(limit::DRAIN).await {
            tracing::warn!(resource = %self.resource, "calls of the kubelet did not end in time");
        }
    }
}

/// Resolves when the kubelet's socket is another than `tried`.
async fn another(seen: &mut watch::Receiver<Arc<Sockets>>, path: &std::path::Path, tried: Option<SocketId>) {
    while seen.changed().await.is_ok() {
        if socket_id(path) != tried {
            return;
        }
    }
    std::future::pending().await
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
