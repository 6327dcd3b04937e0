//! What is asked of the device manager about a pod: the seam at which tests put one that does as it is told.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::devices::{Devices, ResourceOutcome};
use nodedock_model::{ExtendedResource, PodAllocation, PodRequest, Problem, Uid};

/// The device manager, as its handle describes each.
#[async_trait]
pub(super) trait Allocator: Send + Sync {
    async fn allocate(&self, request: &PodRequest, request_id: &Arc<str>) -> Vec<ResourceOutcome>;

    async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: &Arc<str>,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem>;

    async fn free(&self, pod: &Uid) -> Result<(), Problem>;

    async fn pre_start(&self, pod: &Uid, container: &str, request_id: &Arc<str>) -> Result<(), Problem>;

    fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>>;

    fn allocations(&self) -> Vec<Arc<PodAllocation>>;
}

#[async_trait]
impl Allocator for Devices {
    async fn allocate(&self, request: &PodRequest, request_id: &Arc<str>) -> Vec<ResourceOutcome> {
        self.allocate(request, request_id).await
    }

    async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: &Arc<str>,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        self.reallocate(pod, container, resource, request_id).await
    }

    async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        self.free(pod).await
    }

    async fn pre_start(&self, pod: &Uid, container: &str, request_id: &Arc<str>) -> Result<(), Problem> {
        self.pre_start(pod, container, request_id).await
    }

    fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>> {
        self.allocation(pod)
    }

    fn allocations(&self) -> Vec<Arc<PodAllocation>> {
        self.allocations()
    }
}
