//! Reviews: what the caller may do, and as which user. There is one user, who may do everything.

use serde_json::{Value, json};

/// The one user.
const USER: &str = "local";

/// A kind that is answered and never stored.
#[derive(Debug)]
pub(crate) struct Review {
    pub(crate) group: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
}

pub(crate) static REVIEWS: [Review; 2] = [
    Review {
        group: "authentication.k8s.io",
        plural: "selfsubjectreviews",
        kind: "SelfSubjectReview",
    },
    Review {
        group: "authorization.k8s.io",
        plural: "selfsubjectaccessreviews",
        kind: "SelfSubjectAccessReview",
    },
];

/// The review that a path names.
pub(crate) fn find(path: &[&str]) -> Option<&'static Review> {
    let ["apis", group, "v1", plural] = path else {
        return None;
    };
    REVIEWS
        .iter()
        .find(|review| review.group == *group && review.plural == *plural)
}

/// The answer to a review that is created.
pub(crate) fn answer(review: &Review, asked: &Value) -> Value {
    let status = match review.plural {
        "selfsubjectreviews" => {
            json!({ "userInfo": { "username": USER, "groups": ["system:masters"] } })
        }
        _ => json!({ "allowed": true }),
    };
    let mut answer = json!({
        "kind": review.kind, "apiVersion": format!("{}/v1", review.group),
        "metadata": { "creationTimestamp": null }, "status": status,
    });
    if !asked["spec"].is_null() {
        answer["spec"] = asked["spec"].clone();
    }
    answer
}
