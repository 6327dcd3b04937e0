//! Carries out decisions at the local API.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::ensure_node;
use super::objects::{Change, ObjectEvent, key};
use super::state::{FINALIZER, LocalClaimsState, POD_CLAIM, Step};
use crate::client::{ApiError, ErrorKind, KubeClient};
use nodedock_model::ObjectName;

pub(super) struct Writes {
    kube: KubeClient,
    client: kube::Client,
    node: ObjectName,
}

impl Writes {
    pub(super) fn new(kube: KubeClient, node: ObjectName) -> Self {
        Self {
            client: kube.client(),
            kube,
            node,
        }
    }

    /// Writes what a step says, and lets the state know.
    pub(super) async fn take(
        &self,
        step: Step,
        state: &mut LocalClaimsState,
    ) -> Result<(), ApiError> {
        let written = match step {
            Step::MakeNode => {
                ensure_node(&self.kube, &self.node).await?;
                None
            }
            Step::MakeClass(class) => {
                let made = self
                    .classes()
                    .create(&PostParams::default(), &class)
                    .await?;
                tracing::info!(
                    class = made.name_any(),
                    "DeviceClass made for a driver, as there is no other one"
                );
                state.apply(Change::Class(ObjectEvent::Is(Arc::new(made))));
                None
            }
            Step::RemoveClass(class) => {
                let precondition = Preconditions {
                    resource_version: class.resource_version(),
                    uid: class.uid(),
                };
                let params = DeleteParams {
                    preconditions: Some(precondition),
                    ..DeleteParams::default()
                };
                self.classes().delete(&class.name_any(), &params).await?;
                state.apply(Change::Class(ObjectEvent::Gone(key(&*class))));
                None
            }
            Step::Make { pod, claim } => self.make(&pod, &claim).await?,
            Step::Name { pod, claims } => {
                let pod = self.name(&pod, &claims).await?;
                state.apply(Change::Pod(ObjectEvent::Is(Arc::new(pod))));
                None
            }
            Step::Reserve { claim, consumers } => {
                let consumers = (!consumers.is_empty()).then_some(consumers);
                Some(
                    self.status(&claim, json!({ "reservedFor": consumers }))
                        .await?,
                )
            }
            Step::Release(claim) => Some(self.release(&claim).await?),
            Step::Withdraw(claim) => {
                tracing::info!(claim = %format_args!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any()), "a prepared claim has its hardware: it is allocated again");
                Some(
                    self.status(
                        &claim,
                        json!({ "allocation": null, "reservedFor": null, "devices": null }),
                    )
                    .await?,
                )
            }
            Step::Allocate(claim) => self.allocate(claim, state).await?,
        };
        if let Some(claim) = written {
            state.put_claim(Arc::new(claim));
        }
        Ok(())
    }

    fn classes(&self) -> Api<DeviceClass> {
        Api::all(self.client.clone())
    }

    fn claims(&self, of: &ResourceClaim) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &of.namespace().unwrap_or_default())
    }

    /// A claim of a template, as the template is now.
    async fn make(
        &self,
        pod: &Pod,
        claim: &PodResourceClaim,
    ) -> Result<Option<ResourceClaim>, ApiError> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let templates = Api::<ResourceClaimTemplate>::namespaced(self.client.clone(), &namespace);
        let wanted = claim
            .resource_claim_template_name
            .as_deref()
            .unwrap_or_default();
        let template = templates.get(wanted).await?;
        let of_template = template.spec.metadata.unwrap_or_default();
        let mut annotations = of_template.annotations.unwrap_or_default();
        annotations.insert(POD_CLAIM.to_owned(), claim.name.clone());
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: name.clone(),
            uid: pod.uid().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        };
        let made = ResourceClaim {
            metadata: ObjectMeta {
                generate_name: Some(format!("{name}-{}-", claim.name)),
                annotations: Some(annotations),
                labels: of_template.labels,
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: template.spec.spec,
            status: None,
        };
        let claims = Api::<ResourceClaim>::namespaced(self.client.clone(), &namespace);
        claims
            .create(&PostParams::default(), &made)
            .await
            .map(Some)
            .map_err(ApiError::from)
    }

    async fn name(&self, pod: &Pod, claims: &BTreeMap<String, String>) -> Result<Pod, ApiError> {
        let statuses: Vec<Value> = claims
            .iter()
            .map(|(name, claim)| json!({ "name": name, "resourceClaimName": claim }))
            .collect();
        let patch = json!({
            "metadata": { "uid": pod.uid(), "resourceVersion": pod.resource_version() },
            "status": { "resourceClaimStatuses": statuses },
        });
        let pods =
            Api::<Pod>::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        pods.patch_status(
            &pod.name_any(),
            &PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await
        .map_err(ApiError::from)
    }

    /// Changes fields of the status of the claim as it was read, and no other one of its name.
    async fn status(
        &self,
        claim: &ResourceClaim,
        status: Value,
    ) -> Result<ResourceClaim, ApiError> {
        let patch = json!({
            "metadata": { "uid": claim.uid(), "resourceVersion": claim.resource_version() },
            "status": status,
        });
        let claims = self.claims(claim);
        claims
            .patch_status(
                &claim.name_any(),
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await
            .map_err(ApiError::from)
    }

    async fn finalizers(
        &self,
        claim: &ResourceClaim,
        finalizers: Vec<String>,
    ) -> Result<ResourceClaim, ApiError> {
        let patch = json!({ "metadata": {
            "uid": claim.uid(), "resourceVersion": claim.resource_version(), "finalizers": finalizers,
        }});
        let claims = self.claims(claim);
        claims
            .patch(
                &claim.name_any(),
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await
            .map_err(ApiError::from)
    }

    /// Ends the allocation of a claim that is being deleted. One that nothing else keeps is gone then.
    pub(super) async fn release(&self, claim: &ResourceClaim) -> Result<ResourceClaim, ApiError> {
        let others = claim.finalizers().iter().filter(|name| *name != FINALIZER);
        let others: Vec<_> = others.cloned().collect();
        if others.is_empty() {
            let gone = self.finalizers(claim, others).await?;
            return Ok(ResourceClaim {
                status: None,
                ..gone
            });
        }
        let ended = json!({ "allocation": null, "reservedFor": null, "devices": null });
        let claim = self.status(claim, ended).await?;
        self.finalizers(&claim, others).await
    }

    /// Protects the claim, and then writes its devices. `None`: there are none now.
    async fn allocate(
        &self,
        claim: Arc<ResourceClaim>,
        state: &mut LocalClaimsState,
    ) -> Result<Option<ResourceClaim>, ApiError> {
        let allocation = state.begin_allocation(&claim, Timestamp::now());
        // A search takes up to a second, and may not hold up the thread of other tasks.
        let Ok(done) = tokio::task::spawn_blocking(move || allocation.run()).await else {
            state.use_all();
            let words = format!("the allocation of claim {} did not end", claim.name_any());
            return Err(ApiError::new(ErrorKind::Invalid, words));
        };
        let result = match state.end_allocation(done) {
            Ok(result) => result,
            Err(refusal) => {
                tracing::debug!(
                    claim = claim.name_any(),
                    why = refusal.message,
                    "claim not allocated"
                );
                return Ok(None);
            }
        };
        let mut finalizers = claim.finalizers().to_vec();
        let protected = match finalizers.iter().any(|name| name == FINALIZER) {
            true => ResourceClaim::clone(&claim),
            false => {
                finalizers.push(FINALIZER.to_owned());
                self.finalizers(&claim, finalizers).await?
            }
        };
        let result = serde_json::to_value(&result)
            .map_err(|error| ApiError::new(ErrorKind::Invalid, error.to_string()))?;
        let written = self
            .status(&protected, json!({ "allocation": result }))
            .await?;
        tracing::info!(claim = %format_args!("{}/{}", written.namespace().unwrap_or_default(), written.name_any()), "claim allocated");
        Ok(Some(written))
    }
}
