//! Changes that a test makes to objects directly, without a request.

use nodedock_apiserver::ObjectKey;
use serde_json::Value;

use super::ApiServer;
use super::state::named;

/// This second, as objects have it.
pub(super) fn now() -> Value {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
        .into()
}

impl ApiServer {
    /// Stores an object as it is, new or in the place of another, with its status: what it lacks of `uid`,
    /// `creationTimestamp` and `generation` is filled in, and nothing is checked. `kind` says what it is; events are as core has
    /// them, all else as `v1`. Gives the object as it is stored.
    pub fn put(&self, mut object: Value) -> Value {
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        let resource = named(&kind);
        if resource.namespaced && object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = "default".into();
        }
        object["apiVersion"] = if resource.group.is_empty() {
            "v1".into()
        } else {
            format!("{}/v1", resource.group).into()
        };
        self.shared.server.change_unstored(|draft| {
            let text = |field: &str| {
                object["metadata"][field]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()
            };
            let old = draft
                .snapshot()
                .object(resource, &text("namespace"), &text("name"))
                .cloned();
            let old = old.as_deref().map_or(&Value::Null, |old| &old["metadata"]);
            let metadata = &mut object["metadata"];
            let fill = [
                ("uid", uuid::Uuid::new_v4().to_string().into()),
                ("creationTimestamp", now()),
            ];
            for (field, fresh) in fill {
                if metadata[field].is_null() {
                    metadata[field] = if old[field].is_null() {
                        fresh
                    } else {
                        old[field].clone()
                    };
                }
            }
            if resource.generation && metadata["generation"].is_null() {
                metadata["generation"] =
                    (old["generation"].as_i64().unwrap_or_default() + 1).into();
            }
            draft.store(resource, object).as_ref().clone()
        })
    }

    /// `namespace` is empty for an object of the cluster.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.look(|state| state.object(resource, namespace, name).cloned())
    }

    /// Returns objects in the order of namespace and name.
    pub fn list(&self, resource: &str) -> Vec<Value> {
        self.look(|state| state.objects(resource).into_iter().cloned().collect())
    }

    /// Removes and returns an object, regardless of its finalizers.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        let key = ObjectKey {
            resource: named(resource).plural,
            namespace,
            name,
        };
        let removed = self
            .shared
            .server
            .change_unstored(|draft| draft.remove(&key));
        removed.map(|object| object.as_ref().clone())
    }

    /// Changes an object in its place, as another client does.
    ///
    /// # Panics
    ///
    /// If it is not there.
    pub fn edit(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        edit: impl FnOnce(&mut Value),
    ) -> Value {
        let resource = named(resource);
        self.shared.server.change_unstored(|draft| {
            let old = draft.snapshot().object(resource, namespace, name).cloned();
            let old = old.unwrap_or_else(|| {
                panic!("there is no {} {namespace}/{name} to edit", resource.plural)
            });
            let mut object = old.as_ref().clone();
            edit(&mut object);
            if resource.generation && object["spec"] != old["spec"] {
                let generation = old["metadata"]["generation"].as_i64().unwrap_or_default();
                object["metadata"]["generation"] = (generation + 1).into();
            }
            draft.store(resource, object).as_ref().clone()
        })
    }
}
