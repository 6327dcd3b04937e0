//! Creates DeviceClasses with an operator's own rights: the daemon has none to write them.

use kube::ResourceExt;
use kube::api::{Api, DynamicObject, PostParams};

use super::classes::manifest;
use crate::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use nodedock_model::{DriverName, ExtendedResource};

/// Outcome of applying a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    Created,
    /// The API server, which is older, dropped the resource's name.
    WithoutResource,
    /// The cluster has it as it is.
    Unchanged,
    /// The cluster has another one of its name, which stays.
    Differs,
}

/// Creates the DeviceClass of a resource. One that is there is not changed.
///
/// # Errors
///
/// The API server refuses it, with its words, or is not reachable.
pub async fn apply_class(
    client: &KubeClient,
    resource: &ExtendedResource,
    driver: &DriverName,
) -> Result<Applied, ApiError> {
    let wanted = manifest(resource, driver);
    let invalid = |error: serde_json::Error| ApiError::new(ErrorKind::Invalid, error.to_string());
    let class: DynamicObject = serde_json::from_value(wanted.clone()).map_err(invalid)?;
    let api = Api::all_with(
        client.client(),
        &DraVersion::V1.resource(DraResource::Classes),
    );
    match api
        .create(&PostParams::default(), &class)
        .await
        .map_err(ApiError::from)
    {
        Ok(created) => {
            let is_whole = created.data["spec"]["extendedResourceName"] == resource.as_str();
            return Ok(if is_whole {
                Applied::Created
            } else {
                Applied::WithoutResource
            });
        }
        Err(error) if error.kind == ErrorKind::Conflict => {}
        Err(error) => return Err(error),
    }
    let known: DynamicObject = api.get(&class.name_any()).await?;
    let is_same = |field: &str| known.data["spec"][field] == wanted["spec"][field];
    let is_equal = is_same("selectors") && is_same("extendedResourceName");
    Ok(if is_equal {
        Applied::Unchanged
    } else {
        Applied::Differs
    })
}
