//! Watches of `resource.k8s.io`: [`watcher`] in the version that is served now.

use futures::stream::{BoxStream, Stream, StreamExt, unfold};
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};

use super::{API_RETRY_MAX, ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use nodedock_model::ObjectName;

/// Objects in one answer of a list.
const PAGE_ITEMS: u32 = 250;

impl KubeClient {
    /// Lists and watches claims or slices with a field selector, in one namespace or in all. The stream never ends: after an error,
    /// which it logs, it waits as client-go does and lists again. `what` is for the log: `slices of this node`.
    pub fn watch(
        &self,
        what: &'static str,
        resource: DraResource,
        namespace: Option<ObjectName>,
        fields: String,
    ) -> impl Stream<Item = Result<Event<DynamicObject>, ApiError>> + Send + 'static {
        let watch = Watch {
            client: self.clone(),
            what,
            resource,
            namespace,
            fields,
            events: None,
            backoff: DefaultBackoff::default(),
            failed: false,
            reported: false,
        };
        unfold(watch, |mut watch| async move {
            let event = watch.next().await;
            Some((event, watch))
        })
    }
}

struct Watch {
    client: KubeClient,
    what: &'static str,
    resource: DraResource,
    namespace: Option<ObjectName>,
    fields: String,
    events: Option<(DraVersion, BoxStream<'static, watcher::Result<Event<DynamicObject>>>)>,
    /// Starts again after two minutes without a failure.
    backoff: DefaultBackoff,
    failed: bool,
    /// A failure was logged, and its end was not.
    reported: bool,
}

impl Watch {
    async fn next(&mut self) -> Result<Event<DynamicObject>, ApiError> {
        if std::mem::take(&mut self.failed) {
            tokio::time::sleep(self.backoff.next().unwrap_or(API_RETRY_MAX)).await;
        }
        let event = self.event().await;
        match &event {
            Ok(Event::Init) => {}
            Ok(_) if std::mem::take(&mut self.reported) => tracing::info!(what = self.what, "watched again"),
            Ok(_) => {}
            Err(error) => {
                self.failed = true;
                self.report(error);
            }
        }
        event
    }

    /// Logs the first failure. An unreachable API server is a condition of the node.
    fn report(&mut self, error: &ApiError) {
        use ErrorKind::{Expired, Throttled};
        let is_expected = error.is_unreachable() || matches!(error.kind, Expired | Throttled);
        if is_expected || std::mem::replace(&mut self.reported, true) {
            tracing::debug!(what = self.what, %error, "cannot be watched now");
        } else {
            tracing::warn!(what = self.what, %error, "cannot be watched, retrying");
        }
    }

    async fn event(&mut self) -> Result<Event<DynamicObject>, ApiError> {
        let (version, mut events) = match self.events.take() {
            Some(open) => open,
            None => {
                let version = self.client.dra_version().await?;
                (version, self.open(version))
            }
        };
        let event = events.next().await.unwrap_or(Err(watcher::Error::NoResourceVersion)).map_err(meaning);
        match &event {
            Ok(_) => self.events = Some((version, events)),
            Err(error) if error.kind == ErrorKind::NotServed => self.client.forget(version).await,
            Err(_) => {}
        }
        event
    }

    fn open(&self, version: DraVersion) -> BoxStream<'static, watcher::Result<Event<DynamicObject>>> {
        let (client, resource) = (self.client.client(), version.resource(self.resource));
        let api: Api<DynamicObject> = match &self.namespace {
            Some(namespace) => Api::namespaced_with(client, namespace.as_str(), &resource),
            None => Api::all_with(client, &resource),
        };
        let config = watcher::Config::default().fields(&self.fields).page_size(PAGE_ITEMS);
        watcher(api, config).boxed()
    }
}

fn meaning(error: watcher::Error) -> ApiError {
    use watcher::Error;
    match error {
        Error::InitialListFailed(error) | Error::WatchStartFailed(error) | Error::WatchFailed(error) => {
            error.into()
        }
        Error::WatchError(status) => ApiError::of_status(&status),
        other => ApiError::new(ErrorKind::NotKubernetes, other.to_string()),
    }
}
