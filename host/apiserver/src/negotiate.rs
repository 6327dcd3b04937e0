//! Representation of a response that a client accepts, by the header `Accept`.

use crate::status::{self, Refusal};

/// The form of an object or a list in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Whole,
    /// Metadata alone, in this version of `meta.k8s.io`.
    Metadata(MetaVersion),
    /// Rows, in this version of `meta.k8s.io`.
    Table(MetaVersion),
    /// All of discovery in one document, for `/api` and `/apis`.
    AggregatedDiscovery,
}

/// A version of `meta.k8s.io`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetaVersion {
    V1,
    V1Beta1,
}

impl MetaVersion {
    pub(crate) fn api_version(self) -> &'static str {
        match self {
            Self::V1 => "meta.k8s.io/v1",
            Self::V1Beta1 => "meta.k8s.io/v1beta1",
        }
    }
}

/// The first form of the header that the server has. None accepted is an error; an empty header accepts everything.
pub(crate) fn form(accept: &str) -> Result<Form, Refusal> {
    if accept.trim().is_empty() {
        return Ok(Form::Whole);
    }
    accept
        .split(',')
        .find_map(clause)
        .ok_or_else(status::not_acceptable)
}

fn clause(clause: &str) -> Option<Form> {
    let mut parts = clause.split(';').map(str::trim);
    if !matches!(
        parts.next()?.to_ascii_lowercase().as_str(),
        "application/json" | "application/*" | "*/*"
    ) {
        return None;
    }
    let [mut kind, mut group, mut version] = [""; 3];
    for part in parts {
        match part.split_once('=') {
            Some(("as", value)) => kind = value,
            Some(("g", value)) => group = value,
            Some(("v", value)) => version = value,
            _ => {}
        }
    }
    let meta = match (group, version) {
        ("meta.k8s.io", "v1") => Some(MetaVersion::V1),
        ("meta.k8s.io", "v1beta1") => Some(MetaVersion::V1Beta1),
        _ => None,
    };
    match kind {
        "" => Some(Form::Whole),
        "Table" => meta.map(Form::Table),
        "PartialObjectMetadata" | "PartialObjectMetadataList" => meta.map(Form::Metadata),
        "APIGroupDiscoveryList" if (group, version) == ("apidiscovery.k8s.io", "v2") => {
            Some(Form::AggregatedDiscovery)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_supported_media_type_is_chosen() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        for (accept, form) in [
            ("", Form::Whole),
            ("*/*", Form::Whole),
            (
                "application/vnd.kubernetes.protobuf, application/json",
                Form::Whole,
            ),
            ("application/json;stream=watch", Form::Whole),
            (
                &format!("{table},application/json"),
                Form::Table(MetaVersion::V1),
            ),
            (
                "application/json;as=Table;v=v9;g=meta.k8s.io,application/json",
                Form::Whole,
            ),
            (
                "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,\
                 application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1beta1",
                Form::Metadata(MetaVersion::V1Beta1),
            ),
            (crate::discovery::AGGREGATED, Form::AggregatedDiscovery),
        ] {
            assert_eq!(super::form(accept).unwrap(), form, "{accept}");
        }
        for accept in [
            "application/yaml",
            "application/vnd.kubernetes.protobuf",
            "text/html",
        ] {
            assert_eq!(super::form(accept).unwrap_err().code, 406, "{accept}");
        }
    }
}
