"""Manifests held against the schemas of what reads them: Kubernetes, JobSet, Kubeflow Trainer."""

import kubernetes_validate


def validate(*documents):
    """Fails for a field that the schema of a document's kind does not have, or a value of another type."""
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        if kind == "JobSet":
            from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # a second to import

            assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document  # a field it does not know is dropped
            for jobs in document["spec"]["replicatedJobs"]:
                metadata = {"name": f"{name}-{jobs['name']}-0"}
                validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **jobs["template"]})
        elif kind == "TrainJob":
            from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

            assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
        else:
            for version in ("1.31", "1.37"):
                kubernetes_validate.validate(document, version, strict=True)
