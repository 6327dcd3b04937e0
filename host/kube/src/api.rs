//! The way to the API server: raw requests of bounded number, size and time, watches, and what follows a set of objects.
//!
//! Owns the connection and its credentials (which rotate), the rate, and what is known of the server: whether it is there, and which
//! version of `resource.k8s.io` it serves. Objects are JSON, so that fields that we do not know survive, and several versions are
//! spoken. It repeats nothing by itself but a request that was refused with credentials that have just been replaced.

mod answer;
mod connection;
mod error;
mod exchange;
#[cfg(test)]
pub(crate) mod fake;
mod follow;
mod kubeconfig;
mod metrics;
mod rate;
mod reach;
mod retry;
#[cfg(test)]
mod tests;
mod version;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch as channel;
use tokio::time::Instant;

pub use error::{ApiError, Cause};
pub use exchange::ApiExchange;
pub use follow::{Follower, Following, Path, Standing, Target};
pub use kubeconfig::{ApiConfig, ApiStartError};
pub use metrics::{ApiCounts, Verb};
pub use rate::{Pace, Urgency};
pub use reach::Reach;
pub use retry::{chance, retry};
pub use version::Version;
pub use watch::{Watch, WatchEvent};

use connection::{Connection, Live};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit;
use version::{Served, with_query};

/// How we are known among those that write objects, and to whoever reads the server's log.
const MANAGER: &str = "nodedock";
const AGENT: &str = concat!("nodedock/", env!("CARGO_PKG_VERSION"));

/// Handle to the API server. Clones share everything but the urgency.
#[derive(Clone)]
pub struct Api {
    inner: Arc<Inner>,
    urgency: Urgency,
}

struct Inner {
    connection: Connection,
    rate: rate::Rate,
    counts: metrics::Counts,
    served: tokio::sync::Mutex<Served>,
    reach: channel::Sender<Reach>,
}

/// Which objects of a list or a watch. Empty: all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Such as `spec.nodeName=node-1,spec.driver=gpu.example.com`.
    pub fields: Option<String>,
    pub labels: Option<String>,
}

impl Selection {
    pub fn fields(selector: impl Into<String>) -> Self {
        Self { fields: Some(selector.into()), labels: None }
    }
}

/// A whole list. Its items say neither kind nor version.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    pub items: Vec<Value>,
    pub resource_version: String,
}

/// How an object is changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Patch {
    /// RFC 7386.
    Merge(Value),
    /// Kubernetes' own: lists are merged by their keys.
    Strategic(Value),
    /// RFC 6902.
    Json(Value),
    /// Server-side apply under a manager's name; `force` takes fields from other managers.
    Apply { object: Value, manager: String, force: bool },
}

/// What an object has to be to be deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preconditions {
    pub uid: Option<String>,
    pub resource_version: Option<String>,
}

/// A request before it is sent.
struct Ask {
    verb: Verb,
    path: String,
    body: Option<(&'static str, Vec<u8>)>,
    bytes_max: usize,
}

impl Api {
    /// Reads where the API server is and who we are. It need not be there yet.
    pub async fn connect(config: ApiConfig) -> Result<Self, ApiStartError> {
        let pace = config.pace;
        Ok(Self::over(Connection::open(config).await?, pace))
    }

    fn over(connection: Connection, pace: Pace) -> Self {
        let inner = Inner {
            connection,
            rate: rate::Rate::new(pace),
            counts: metrics::Counts::default(),
            served: tokio::sync::Mutex::default(),
            reach: channel::Sender::default(),
        };
        Self { inner: Arc::new(inner), urgency: Urgency::Usual }
    }

    /// The same for requests that a pod waits for.
    #[must_use]
    pub fn urgent(&self) -> Self {
        Self { urgency: Urgency::Urgent, ..self.clone() }
    }

    /// The same for requests that nobody waits for.
    #[must_use]
    pub fn usual(&self) -> Self {
        Self { urgency: Urgency::Usual, ..self.clone() }
    }

    pub async fn get(&self, path: &str) -> Result<Value, ApiError> {
        self.ask(Ask::of(Verb::Get, path.to_owned())).await
    }

    /// Every page of a list, from the newest state.
    pub async fn list(&self, path: &str, selection: &Selection) -> Result<Listed, ApiError> {
        let page_items = limit::API_PAGE_ITEMS.to_string();
        let mut items: Vec<Value> = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let mut parameters = vec![("limit", page_items.as_str())];
            parameters.extend(selection.parameters());
            parameters.extend(next.as_deref().map(|next| ("continue", next)));
            let mut ask = Ask::of(Verb::List, with_query(path, &parameters));
            ask.bytes_max = limit::API_PAGE_BYTES_MAX;
            let page = answer::page(self.ask(ask).await?)?;
            items.extend(page.items);
            if items.len() > limit::API_LIST_ITEMS_MAX {
                let words = format!("a list of more than {} objects at {path}", limit::API_LIST_ITEMS_MAX);
                return Err(ApiError::NotAnswer(words));
            }
            match page.next {
                // A server that repeats itself would keep us for ever.
                Some(token) if next.as_ref() == Some(&token) => {
                    return Err(ApiError::NotAnswer(format!("the same page of {path} again")));
                }
                Some(token) => next = Some(token),
                None => return Ok(Listed { items, resource_version: page.resource_version }),
            }
        }
    }

    pub async fn create(&self, path: &str, object: &Value) -> Result<Value, ApiError> {
        let path = with_query(path, &[("fieldManager", MANAGER)]);
        self.ask(Ask::of(Verb::Create, path).with("application/json", object)).await
    }

    /// Replaces the object; with `metadata.resourceVersion` only the one that was read.
    pub async fn update(&self, path: &str, object: &Value) -> Result<Value, ApiError> {
        let path = with_query(path, &[("fieldManager", MANAGER)]);
        self.ask(Ask::of(Verb::Update, path).with("application/json", object)).await
    }

    pub async fn patch(&self, path: &str, patch: &Patch) -> Result<Value, ApiError> {
        let mut parameters = vec![("fieldManager", MANAGER)];
        let (kind, body) = match patch {
            Patch::Merge(body) => ("application/merge-patch+json", body),
            Patch::Strategic(body) => ("application/strategic-merge-patch+json", body),
            Patch::Json(body) => ("application/json-patch+json", body),
            Patch::Apply { object, manager, force } => {
                parameters = vec![("fieldManager", manager.as_str())];
                parameters.extend(force.then_some(("force", "true")));
                ("application/apply-patch+yaml", object)
            }
        };
        self.ask(Ask::of(Verb::Patch, with_query(path, &parameters)).with(kind, body)).await
    }

    /// Deletes the object if it is the one that is meant.
    pub async fn delete(&self, path: &str, preconditions: &Preconditions) -> Result<(), ApiError> {
        let mut wanted = serde_json::Map::new();
        wanted.extend(preconditions.uid.as_ref().map(|uid| ("uid".to_owned(), json!(uid))));
        let version = preconditions.resource_version.as_ref();
        wanted.extend(version.map(|version| ("resourceVersion".to_owned(), json!(version))));
        let mut options = json!({ "apiVersion": "v1", "kind": "DeleteOptions" });
        if !wanted.is_empty() {
            options["preconditions"] = Value::Object(wanted);
        }
        let ask = Ask::of(Verb::Delete, path.to_owned()).with("application/json", &options);
        self.ask(ask).await.map(drop)
    }

    /// Opens a watch from a resource version on.
    pub async fn watch(
        &self,
        path: &str,
        selection: &Selection,
        resource_version: &str,
    ) -> Result<Watch, ApiError> {
        let wall = limit::WATCH_WALL.as_secs().to_string();
        let mut parameters = vec![
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", wall.as_str()),
            ("resourceVersion", resource_version),
        ];
        parameters.extend(selection.parameters());
        let ask = Ask::of(Verb::Watch, with_query(path, &parameters));
        let response = self.sent(&ask).await?;
        Ok(Watch::new(response.into_body(), path.to_owned()))
    }

    /// The version of `resource.k8s.io` to speak.
    pub async fn version(&self) -> Result<Version, ApiError> {
        let since = Instant::now();
        let mut served = self.inner.served.lock().await;
        if let Some(known) = served.known(since, Instant::now()) {
            return known;
        }
        // Whoever waits for it may be a pod.
        let asked = self.urgent().ask_version().await;
        let before = served.version;
        let outcome = served.learn(asked, Instant::now());
        if let Ok(version) = outcome
            && before != Some(version)
        {
            tracing::info!(version = version.as_str(), "version of resource.k8s.io that is spoken");
        }
        outcome
    }

    async fn ask_version(&self) -> Result<Version, ApiError> {
        match self.get(version::GROUP_PATH).await {
            Ok(group) => version::choose(&group).map_err(|served| {
                let served = if served.is_empty() { "nothing".to_owned() } else { served.join(", ") };
                ApiError::NotServed(format!(
                    "resource.k8s.io in v1, v1beta2 or v1beta1 (of this group it serves {served}); \
                     dynamic resource allocation has to be turned on in the cluster"
                ))
            }),
            Err(ApiError::NotFound(_) | ApiError::NotServed(_)) => Err(ApiError::NotServed(
                "resource.k8s.io; dynamic resource allocation has to be turned on in the cluster".to_owned(),
            )),
            Err(error) => Err(error),
        }
    }

    /// Asks with the version that is served; once more if that has just changed.
    pub async fn versioned<T, F>(&self, mut ask: impl FnMut(Version) -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let version = self.version().await?;
        match ask(version).await {
            Err(ApiError::NotServed(what)) => {
                self.forget(version).await;
                let other = self.version().await?;
                if other == version {
                    return Err(ApiError::NotServed(what));
                }
                ask(other).await
            }
            outcome => outcome,
        }
    }

    /// The version is not served: which one is has to be asked again.
    async fn forget(&self, version: Version) {
        let mut served = self.inner.served.lock().await;
        served.version.take_if(|known| *known == version);
    }

    /// Follows a set of objects until what is given is dropped, or the tasks stop.
    #[must_use]
    pub fn follow(&self, tasks: &Tasks, target: Target, follower: Arc<dyn Follower>) -> Following {
        follow::start(self.clone(), tasks, target, follower)
    }

    /// Says as a condition of the node that the API server is away, until it is back.
    pub fn tell_reach(&self, conditions: Conditions, tasks: &Tasks) {
        reach::tell(self.clone(), conditions, tasks);
    }

    /// Whether it is there, as the last request found.
    pub fn reach(&self) -> channel::Receiver<Reach> {
        self.inner.reach.subscribe()
    }

    /// Whether the last request found nobody.
    pub fn is_away(&self) -> bool {
        matches!(*self.inner.reach.borrow(), Reach::Away { .. })
    }

    pub fn counts(&self) -> ApiCounts {
        self.inner.counts.view()
    }

    /// Asks for something that everybody may read.
    async fn probe(&self) -> Result<Value, ApiError> {
        self.get(version::GROUP_PATH).await
    }

    async fn ask(&self, ask: Ask) -> Result<Value, ApiError> {
        let used = self.inner.connection.current().await;
        match self.once(&ask, &used).await {
            Err(ApiError::Unauthorized(_)) if self.inner.connection.is_other_than(&used).await => {
                self.inner.counts.retries.fetch_add(1, Relaxed);
                let now = self.inner.connection.current().await;
                self.once(&ask, &now).await
            }
            outcome => outcome,
        }
    }

    /// Opens an answer of unknown length.
    async fn sent(&self, ask: &Ask) -> Result<Response<Body>, ApiError> {
        let used = self.inner.connection.current().await;
        match self.timed(ask, self.response(ask, &used)).await {
            Err(ApiError::Unauthorized(_)) if self.inner.connection.is_other_than(&used).await => {
                self.inner.counts.retries.fetch_add(1, Relaxed);
                let now = self.inner.connection.current().await;
                self.timed(ask, self.response(ask, &now)).await
            }
            outcome => outcome,
        }
    }

    async fn once(&self, ask: &Ask, live: &Live) -> Result<Value, ApiError> {
        let whole = async {
            let response = self.response(ask, live).await?;
            let code = response.status();
            let content_type = content_type(&response);
            let body = answer::collect(response.into_body(), ask.bytes_max).await?;
            let object = answer::object(&content_type, &body)?;
            // A gateway may wrap what an API server says.
            if object.get("kind").and_then(Value::as_str) == Some("Status")
                && object.get("status").and_then(Value::as_str) == Some("Failure")
            {
                return Err(error::of_answer(code, &ask.path, &content_type, None, &body));
            }
            Ok(object)
        };
        self.timed(ask, whole).await
    }

    async fn timed<T>(
        &self,
        ask: &Ask,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        self.timed_as(ask, work, |_| 200).await
    }

    /// A request in its turn and within its time; what it says of the API server is learned. `code`: the status of an answer.
    async fn timed_as<T>(
        &self,
        ask: &Ask,
        work: impl Future<Output = Result<T, ApiError>>,
        code: impl Fn(&T) -> u16,
    ) -> Result<T, ApiError> {
        let asked = Instant::now();
        let turn = self.inner.rate.turn(self.urgency).await;
        self.inner.counts.waited(asked.elapsed());
        let _turn = turn?;
        let sent = Instant::now();
        let outcome = tokio::time::timeout(limit::API_REQUEST, work).await.unwrap_or_else(|_| {
            Err(ApiError::unavailable(format!("no answer within {} s", limit::API_REQUEST.as_secs())))
        });
        let code = outcome.as_ref().map_or_else(code_of, &code);
        self.inner.counts.answered(ask.verb, version::resource_of(&ask.path), code, sent.elapsed());
        reach::learn(&self.inner.reach, outcome.as_ref().err());
        if let Err(error) = &outcome
            && let Some(delay) = error.retry_after()
        {
            self.inner.rate.pause(delay);
        }
        outcome
    }

    /// The head of an answer that says success.
    async fn response(&self, ask: &Ask, live: &Live) -> Result<Response<Body>, ApiError> {
        let response = live.client.send(ask.request(live)?).await;
        let response = response.map_err(|error| ApiError::unavailable(answer::spoken(error)))?;
        let code = response.status();
        if code.is_success() {
            return Ok(response);
        }
        let (content_type, retry_after) = (content_type(&response), error::retry_after(response.headers()));
        if code.is_redirection() {
            let to = response.headers().get(http::header::LOCATION).and_then(|to| to.to_str().ok());
            let to = nodedock_base::printable::one_line(to.unwrap_or("nowhere"), 128);
            return Err(ApiError::NotAnswer(format!(
                "{code} to {to}; is there a proxy or a login page between?"
            )));
        }
        let body = answer::collect(response.into_body(), limit::API_OBJECT_BYTES_MAX).await?;
        Err(error::of_answer(code, &ask.path, &content_type, retry_after, &body))
    }
}

impl Selection {
    fn parameters(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let fields = self.fields.as_deref().map(|fields| ("fieldSelector", fields));
        fields.into_iter().chain(self.labels.as_deref().map(|labels| ("labelSelector", labels)))
    }
}

impl Ask {
    fn of(verb: Verb, path: String) -> Self {
        Self { verb, path, body: None, bytes_max: limit::API_OBJECT_BYTES_MAX }
    }

    fn with(mut self, kind: &'static str, body: &Value) -> Self {
        self.body = Some((kind, body.to_string().into_bytes()));
        self
    }

    fn method(&self) -> Method {
        match self.verb {
            Verb::Get | Verb::List | Verb::Watch => Method::GET,
            Verb::Create => Method::POST,
            Verb::Update => Method::PUT,
            Verb::Patch => Method::PATCH,
            Verb::Delete => Method::DELETE,
        }
    }

    fn request(&self, live: &Live) -> Result<Request<Body>, ApiError> {
        let mut request = Request::builder()
            .method(self.method())
            .uri(self.path.as_str())
            .header(USER_AGENT, AGENT)
            .header(ACCEPT, "application/json");
        if let Some(authorization) = &live.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let body = match &self.body {
            Some((kind, bytes)) => {
                request = request.header(CONTENT_TYPE, *kind);
                Body::from(bytes.clone())
            }
            None => Body::empty(),
        };
        let wrong = |error| ApiError::Invalid {
            words: format!("{:?} is no path of a request: {error}", self.path),
            causes: Vec::new(),
        };
        request.body(body).map_err(wrong)
    }
}

fn content_type(response: &Response<Body>) -> String {
    let value = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}

/// The status code that an error stands for; 0: no answer of an API server.
fn code_of(error: &ApiError) -> u16 {
    match error {
        ApiError::NotFound(_) | ApiError::NotServed(_) => 404,
        ApiError::Conflict(_) | ApiError::AlreadyExists(_) => 409,
        ApiError::Expired(_) => 410,
        ApiError::TooManyRequests { .. } => 429,
        ApiError::Forbidden(_) => 403,
        ApiError::Unauthorized(_) => 401,
        ApiError::Invalid { .. } => 422,
        ApiError::NotAnswer(_) | ApiError::Unavailable { .. } => 0,
    }
}
