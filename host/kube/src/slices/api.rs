//! Requests for slices, in the version that the server serves.

use kube::Api;
use kube::api::{ApiResource, DeleteParams, ListParams, PostParams, Preconditions, TypeMeta};

use super::diff::CounterPlacement;
use super::slice::{self, NODEDOCK, Slice};
use crate::client::{ApiError, DraResource, DraVersion, KubeClient};

/// First minor version of Kubernetes 1 in which counter sets are in slices of their own.
const OWN_COUNTER_SLICES_SINCE: u32 = 35;

pub(super) struct SliceApi(pub(super) KubeClient);

impl SliceApi {
    async fn request<T, F>(
        &self,
        request: impl Fn(Api<Slice>, ApiResource) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let answer = self.0.versioned(|version| {
            let resource = version.resource(DraResource::Slices);
            let answer = request(Api::all_with(self.0.client(), &resource), resource);
            async move { Ok(answer.await?) }
        });
        answer.await
    }

    pub(super) async fn create(&self, slice: &Slice) -> Result<Slice, ApiError> {
        self.request(|api, version| async move {
            api.create(&as_nodedock(), &in_version(slice, &version))
                .await
        })
        .await
    }

    /// Lists the slices of a node, which need not be this one.
    pub(super) async fn of_node(&self, node: &str) -> Result<Vec<Slice>, ApiError> {
        let params = &ListParams::default().fields(&format!("spec.nodeName={node}"));
        let listed = self.request(|api, _| async move { api.list(params).await });
        Ok(listed.await?.items)
    }

    /// Fails with a conflict if the slice changed since it was observed.
    pub(super) async fn update(&self, slice: &Slice) -> Result<Slice, ApiError> {
        self.request(|api, version| async move {
            api.replace(
                slice::name(slice),
                &as_nodedock(),
                &in_version(slice, &version),
            )
            .await
        })
        .await
    }

    /// Fails with a conflict if the slice changed since it was observed.
    pub(super) async fn delete(&self, slice: &Slice) -> Result<(), ApiError> {
        let (uid, resource_version) = (
            slice.metadata.uid.clone(),
            slice.metadata.resource_version.clone(),
        );
        let params = &DeleteParams::default().preconditions(Preconditions {
            uid,
            resource_version,
        });
        self.request(|api, _| async move { api.delete(slice::name(slice), params).await.map(drop) })
            .await
    }

    /// Returns where the server wants counter sets, or `None` if it does not report its version.
    pub(super) async fn counter_placement(&self) -> Option<CounterPlacement> {
        let (major, minor) = self.0.server_version().await?;
        let is_old = major == 1 && minor < OWN_COUNTER_SLICES_SINCE;
        Some(if is_old {
            CounterPlacement::WithDevices
        } else {
            CounterPlacement::OwnSlice
        })
    }
}

fn as_nodedock() -> PostParams {
    PostParams {
        field_manager: Some(NODEDOCK.to_owned()),
        dry_run: false,
    }
}

fn in_version(slice: &Slice, version: &ApiResource) -> Slice {
    let mut slice = slice.clone();
    if version.version == DraVersion::V1beta1.as_str() {
        slice
            .spec
            .content
            .devices
            .values_mut()
            .for_each(|device| *device = device.v1beta1());
    }
    let types = TypeMeta {
        api_version: version.api_version.clone(),
        kind: version.kind.clone(),
    };
    Slice {
        types: Some(types),
        ..slice
    }
}
