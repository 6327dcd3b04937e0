//! The local API by its Unix socket, for the command line.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use http::uri::{Authority, Scheme};
use http::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch,
    PatchParams, PostParams, Preconditions,
};
use kube::client::Body;
use kube::runtime::watcher::{self, watcher};
use kube::runtime::{WatchStreamExt, wait};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::client::{ApiError, DraResource, DraVersion, ErrorKind, named};

/// The owner of the fields that are applied here.
const FIELD_MANAGER: &str = "nodedock";

/// Kinds that can be made and deleted, by `apiVersion` and `kind`, and whether they are in a namespace.
const KINDS: [(&str, &str, &str, bool); 6] = [
    ("", "v1", "Namespace", false),
    ("", "v1", "Pod", true),
    ("resource.k8s.io", "v1", "DeviceClass", false),
    ("resource.k8s.io", "v1", "ResourceClaim", true),
    ("resource.k8s.io", "v1", "ResourceClaimTemplate", true),
    ("resource.k8s.io", "v1", "ResourceSlice", false),
];

/// Returns whether the local API has no objects of this group and kind, in any version.
pub fn is_foreign(object: &Value) -> bool {
    let [api_version, kind] = version_and_kind(object);
    let (group, _) = group_and_version(api_version);
    !KINDS
        .iter()
        .any(|known| (known.0, known.2) == (group, kind))
}

fn version_and_kind(object: &Value) -> [&str; 2] {
    ["apiVersion", "kind"].map(|field| object[field].as_str().unwrap_or_default())
}

fn group_and_version(api_version: &str) -> (&str, &str) {
    api_version
        .split_once('/')
        .filter(|(group, _)| !group.is_empty())
        .unwrap_or(("", api_version))
}

/// A client of the local API.
#[derive(Clone)]
pub struct LocalClient(kube::Client);

/// Why an object cannot be made, changed or deleted.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error(
        "{0} is no kind that can be made here: Namespace, Pod (v1), DeviceClass, ResourceClaim, ResourceClaimTemplate and ResourceSlice (resource.k8s.io/v1) are"
    )]
    Kind(String),
    #[error("the object is malformed")]
    Malformed(#[from] serde_json::Error),
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// Outcome of applying an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    Created,
    Updated,
    Unchanged,
}

impl LocalClient {
    /// Tries the socket once.
    ///
    /// # Errors
    ///
    /// There is no listener, or it may not be opened.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        UnixStream::connect(socket).await?;
        let path: PathBuf = socket.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            Box::pin(async move { UnixStream::connect(path).await.map(TokioIo::new) })
        });
        let client = Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
        let service = tower::service_fn(move |mut request: Request<Body>| {
            let client = client.clone();
            let mut parts = request.uri().clone().into_parts();
            parts.scheme = Some(Scheme::HTTP);
            parts.authority = Some(Authority::from_static("local"));
            async move {
                *request.uri_mut() = Uri::from_parts(parts)?;
                Ok::<_, tower::BoxError>(client.request(named(request)).await?)
            }
        });
        Ok(Self(kube::Client::new(service, "default")))
    }

    /// The objects of the kind of `object`, in `namespace` unless it names one.
    fn like(&self, object: &Value, namespace: &str) -> Result<Api<DynamicObject>, ObjectError> {
        let [api_version, kind] = version_and_kind(object);
        let (group, version) = group_and_version(api_version);
        let known = KINDS
            .iter()
            .find(|known| (known.0, known.1, known.2) == (group, version, kind));
        let Some((group, version, kind, is_namespaced)) = known else {
            return Err(ObjectError::Kind(
                format!("{api_version} {kind}").trim().to_owned(),
            ));
        };
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .unwrap_or(namespace);
        Ok(match is_namespaced {
            true => Api::namespaced_with(self.0.clone(), namespace, &resource),
            false => Api::all_with(self.0.clone(), &resource),
        })
    }

    /// Makes an object, in `namespace` unless it names one.
    pub async fn create(&self, object: &Value, namespace: &str) -> Result<Value, ObjectError> {
        let api = self.like(object, namespace)?;
        let object: DynamicObject = serde_json::from_value(object.clone())?;
        let created = api
            .create(&PostParams::default(), &object)
            .await
            .map_err(ApiError::from)?;
        Ok(serde_json::to_value(created)?)
    }

    /// Makes an object, or changes the one of its name: what was applied before and is not in `object` is removed.
    pub async fn apply(
        &self,
        object: &Value,
        namespace: &str,
    ) -> Result<(Value, Applied), ObjectError> {
        let api = self.like(object, namespace)?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if name.is_empty() {
            return Ok((self.create(object, namespace).await?, Applied::Created));
        }
        let before = api.get_metadata_opt(name).await.map_err(ApiError::from)?;
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let after = api
            .patch(name, &params, &Patch::Apply(object))
            .await
            .map_err(ApiError::from)?;
        let applied = match before {
            None => Applied::Created,
            Some(before) if before.metadata.resource_version == after.metadata.resource_version => {
                Applied::Unchanged
            }
            Some(_) => Applied::Updated,
        };
        Ok((serde_json::to_value(after)?, applied))
    }

    /// Returns an object as it would be after [`Self::create`], or after [`Self::apply`] if `is_applied`. Nothing is made.
    pub async fn check(
        &self,
        object: &Value,
        namespace: &str,
        is_applied: bool,
    ) -> Result<Value, ObjectError> {
        let api = self.like(object, namespace)?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let checked = if is_applied && !name.is_empty() {
            let params = PatchParams::apply(FIELD_MANAGER).force().dry_run();
            api.patch(name, &params, &Patch::Apply(object)).await
        } else {
            let object: DynamicObject = serde_json::from_value(object.clone())?;
            let params = PostParams {
                dry_run: true,
                ..PostParams::default()
            };
            api.create(&params, &object).await
        };
        Ok(serde_json::to_value(checked.map_err(ApiError::from)?)?)
    }

    /// Deletes the object with the kind and the name of `object`, and returns it as it was. `None`: it is not there.
    pub async fn delete(
        &self,
        object: &Value,
        namespace: &str,
    ) -> Result<Option<Value>, ObjectError> {
        let api = self.like(object, namespace)?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let Some(found) = api.get_opt(name).await.map_err(ApiError::from)? else {
            return Ok(None);
        };
        let same = Preconditions {
            uid: found.metadata.uid.clone(),
            ..Preconditions::default()
        };
        match api
            .delete(name, &DeleteParams::default().preconditions(same))
            .await
            .map_err(ApiError::from)
        {
            Ok(_) => Ok(Some(serde_json::to_value(found)?)),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn claims_in(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(
            self.0.clone(),
            namespace,
            &DraVersion::V1.resource(DraResource::Claims),
        )
    }

    /// Every claim of a namespace; of all, if it is none.
    pub async fn claims(&self, namespace: Option<&str>) -> Result<Vec<Value>, ApiError> {
        let resource = DraVersion::V1.resource(DraResource::Claims);
        let api = match namespace {
            Some(namespace) => self.claims_in(namespace),
            None => Api::all_with(self.0.clone(), &resource),
        };
        list(&api, &resource).await
    }

    /// The slices of all drivers.
    pub async fn slices(&self) -> Result<Vec<Value>, ApiError> {
        let resource = DraVersion::V1.resource(DraResource::Slices);
        list(&Api::all_with(self.0.clone(), &resource), &resource).await
    }

    pub async fn device_classes(&self) -> Result<Vec<Value>, ApiError> {
        let resource = DraVersion::V1.resource(DraResource::Classes);
        list(&Api::all_with(self.0.clone(), &resource), &resource).await
    }

    pub async fn claim(&self, namespace: &str, name: &str) -> Result<Option<Value>, ApiError> {
        let found = self.claims_in(namespace).get_opt(name).await?;
        Ok(found.and_then(|claim| serde_json::to_value(claim).ok()))
    }

    /// Waits until each claim of a pod that is made from a template has a name, and returns the pod. `None`: it is not there, or was deleted.
    pub async fn pod_with_claims(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, ApiError> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        let pods: Api<DynamicObject> = Api::namespaced_with(self.0.clone(), namespace, &resource);
        let is_complete = |pod: Option<&DynamicObject>| {
            pod.is_none_or(|pod| has_claims(&pod.data["spec"], &pod.data["status"]))
        };
        let found = wait::await_condition(pods, name, is_complete)
            .await
            .map_err(|error| ApiError::new(ErrorKind::Unreachable, error.to_string()))?;
        let value = found.map(serde_json::to_value).transpose();
        value.map_err(|error| ApiError::new(ErrorKind::NotKubernetes, error.to_string()))
    }

    /// Returns the claims of a pod that cannot be made, as their ResourceClaimTemplate is not there: each with the name of the template.
    pub async fn claims_without_template(
        &self,
        namespace: &str,
        pod: &str,
    ) -> Result<Vec<(String, String)>, ApiError> {
        let api = |group, version, kind| -> Api<DynamicObject> {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
            Api::namespaced_with(self.0.clone(), namespace, &resource)
        };
        let templates = api("resource.k8s.io", "v1", "ResourceClaimTemplate");
        let Some(pod) = api("", "v1", "Pod").get_opt(pod).await? else {
            return Ok(Vec::new());
        };
        let mut without = Vec::new();
        for (claim, template) in unmade(&pod.data["spec"], &pod.data["status"]) {
            if templates.get_metadata_opt(template).await?.is_none() {
                without.push((claim.to_owned(), template.to_owned()));
            }
        }
        Ok(without)
    }

    /// Changes annotations of the claim with this UID, and of this version if one is given, and returns it. `None` removes one.
    pub async fn annotate(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        version: Option<&str>,
        annotations: &[(String, Option<String>)],
    ) -> Result<Value, ApiError> {
        let annotations: serde_json::Map<_, _> = annotations
            .iter()
            .map(|(key, value)| (key.clone(), json!(value)))
            .collect();
        let mut patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
        if let Some(version) = version {
            patch["metadata"]["resourceVersion"] = version.into();
        }
        let claims = self.claims_in(namespace);
        let patched = claims
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        Ok(serde_json::to_value(patched).unwrap_or_default())
    }

    /// Deletes a claim, the one with this UID if it is given. Returns whether it was there.
    pub async fn delete_claim(
        &self,
        namespace: &str,
        name: &str,
        uid: Option<&str>,
    ) -> Result<bool, ApiError> {
        let mut params = DeleteParams::default();
        if let Some(uid) = uid {
            params = params.preconditions(Preconditions {
                uid: Some(uid.to_owned()),
                ..Preconditions::default()
            });
        }
        match self
            .claims_in(namespace)
            .delete(name, &params)
            .await
            .map_err(ApiError::from)
        {
            Ok(_) => Ok(true),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until a claim is allocated, and returns it. `None`: it was deleted, or is not there.
    pub async fn until_allocated(&self, namespace: &str, name: &str) -> Option<Value> {
        let fields = format!("metadata.name={name}");
        let config = watcher::Config::default().fields(&fields);
        let events = watcher(self.claims_in(namespace), config).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut found = false;
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::InitApply(claim) | watcher::Event::Apply(claim)) => {
                    found = true;
                    if claim.metadata.deletion_timestamp.is_some() {
                        return None;
                    }
                    let is_allocated = claim.data["status"]["allocation"].is_object();
                    if let (true, Ok(claim)) = (is_allocated, serde_json::to_value(claim)) {
                        return Some(claim);
                    }
                }
                Ok(watcher::Event::Init) => found = false,
                Ok(watcher::Event::InitDone) if !found => return None,
                Ok(watcher::Event::Delete(_)) => return None,
                Ok(_) => {}
                // The daemon may be away for a moment.
                Err(error) => tracing::debug!(%error, "the claim cannot be watched now"),
            }
        }
        None
    }

    /// Waits until the claim with this UID is gone. Returns whether it is.
    pub async fn until_gone(&self, namespace: &str, name: &str, uid: &str, most: Duration) -> bool {
        let gone = wait::await_condition(
            self.claims_in(namespace),
            name,
            wait::conditions::is_deleted(uid),
        );
        matches!(timeout(most, gone).await, Ok(Ok(_)))
    }
}

/// Returns whether every claim of a pod that is made from a template is in the pod's status.
fn has_claims(spec: &Value, status: &Value) -> bool {
    unmade(spec, status).is_empty()
}

/// The claims of a pod that are made from templates and not in the pod's status, each with its template.
fn unmade<'a>(spec: &'a Value, status: &Value) -> Vec<(&'a str, &'a str)> {
    let claims = spec["resourceClaims"].as_array().into_iter().flatten();
    let made: Vec<_> = status["resourceClaimStatuses"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|made| &made["name"])
        .collect();
    let unmade = claims.filter_map(|claim| {
        let template = claim["resourceClaimTemplateName"].as_str()?;
        let is_made = made.contains(&&claim["name"]);
        (!is_made).then(|| (claim["name"].as_str().unwrap_or_default(), template))
    });
    unmade.collect()
}

async fn list(api: &Api<DynamicObject>, resource: &ApiResource) -> Result<Vec<Value>, ApiError> {
    let listed = api.list(&ListParams::default()).await?;
    let objects = listed.items.into_iter().filter_map(|object| {
        let mut object = serde_json::to_value(object).ok()?;
        object["apiVersion"] = resource.api_version.clone().into();
        object["kind"] = resource.kind.clone().into();
        Some(object)
    });
    Ok(objects.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_claims_are_awaited() {
        let spec = json!({ "resourceClaims": [
            { "name": "own", "resourceClaimName": "a" },
            { "name": "made", "resourceClaimTemplateName": "t" },
        ] });
        let status = |name: &str| json!({ "resourceClaimStatuses": [{ "name": name }] });
        assert!(has_claims(&spec, &status("made")));
        assert!(!has_claims(&spec, &status("own")));
        assert!(!has_claims(&spec, &Value::Null));
        assert_eq!(unmade(&spec, &status("own")), [("made", "t")]);
        assert!(has_claims(&json!({}), &Value::Null));
    }

    #[test]
    fn foreign_kinds_have_other_groups() {
        let of =
            |version: &str, kind: &str| is_foreign(&json!({ "apiVersion": version, "kind": kind }));
        assert!(!of("resource.k8s.io/v1", "ResourceClaim"));
        assert!(!of("resource.k8s.io/v1beta2", "ResourceClaim"));
        assert!(!of("v1", "Pod"));
        assert!(of("apps/v1", "Deployment") && of("v1", "Service") && of("v1", "ResourceClaim"));
    }
}
