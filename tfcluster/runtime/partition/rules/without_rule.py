"""Ops that are computed whole, and why."""

from __future__ import annotations

from tfcluster.runtime.partition.rules.table import whole, whole_family

STATE = "it changes or reads state that all ranks have alike"
whole(
    STATE,
    *("VarHandleOp", "DestroyResourceOp", "RngReadAndSkip", "RngSkip"),
    *("IsVariableInitialized", "AnonymousRandomSeedGenerator"),
    *("AnonymousSeedGenerator", "DeleteRandomSeedGenerator", "DeleteSeedGenerator"),
    *("Variable", "VariableV2", "TemporaryVariable", "DestroyTemporaryVariable"),
    *("Assign", "AssignAdd", "AssignSub", "CountUpTo", "DummyIterationCounter"),
)
whole_family(
    STATE,
    # Only variables that are divided have rules for these.
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *("ReadVariableOp", "VariableShape", "VarIsInitializedOp", "DisableCopyOnRead"),
    *("ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStrided"),
    *("ResourceCountUpTo", "ResourceAccumulator", "ResourceConditional"),
    *("SparseApply", "Scatter", "Accumulator", "SparseAccumulator", "Conditional"),
    *("SparseConditional", "StatefulStandardNormal", "StatefulTruncated"),
    *("StatefulUniform", "NonDeterministicInts", "InitializeTable", "HashTable"),
    *("MutableHashTable", "MutableDenseHashTable", "AnonymousHashTable"),
    *("AnonymousMutable", "LookupTableExport", "LookupTableImport"),
    *("LookupTableInsert", "LookupTableRemove", "LookupTableSize", "TensorArray"),
    *("Stack", "Barrier", "FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "Queue"),
    *("RandomShuffleQueue", "Mutex", "BoostedTrees", "TensorMap"),
)
whole(
    "it runs a program's own code on the host",
    *("PyFunc", "EagerPyFunc", "PyFuncStateless"),
)
whole(
    "it has an effect",
    *("PrintV2", "Print", "Assert", "Abort", "Timestamp", "WriteFile", "ReadFile"),
    *("MatchingFiles", "Save", "SaveV2", "SaveSlices", "Restore", "RestoreV2"),
    *("RestoreSlice", "MergeV2Checkpoints", "ShardedFilename", "ShardedFilespec"),
    *("ImportEvent", "CheckPinned"),
)
whole_family(
    "it writes what TensorBoard shows",
    *("Write", "AudioSummary", "HistogramSummary", "ImageSummary", "MergeSummary"),
    *("ScalarSummary", "TensorSummary", "CreateSummary", "CloseSummary"),
    *("FlushSummary", "SummaryWriter", "StatsAggregator"),
)
whole(
    "it depends on no data",
    *("Const", "Placeholder", "PlaceholderV2", "Range", "LinSpace", "Empty"),
    *("FakeParam", "EmptyTensorMap", "DeviceIndex", "GetOptions", "ImmutableConst"),
    *("StatelessRandomGetAlg", "StatelessRandomGetKeyCounter"),
    *("StatelessRandomGetKeyCounterAlg", "SobolSample"),
)
whole(
    "it computes shapes, which are known",
    *("BroadcastArgs", "BroadcastGradientArgs", "ConcatOffset", "InvertPermutation"),
    *("DataFormatDimMap", "DataFormatVecPermute", "GuaranteeConst"),
)
whole(
    "its inputs' values say where they are in the result",
    *("DynamicStitch", "ParallelDynamicStitch", "TileGrad"),
)
whole(
    "the number of its results depends on the data of all rows",
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    *("ListDiff", "DynamicPartition", "SetSize", "CTCGreedyDecoder"),
    *("CTCBeamSearchDecoder", "StringSplit", "StringSplitV2", "StringNGrams"),
    *("UnicodeDecode", "UnicodeDecodeWithOffsets", "DenseCountSparseOutput"),
    *("DenseToDenseSetOperation", "DenseToSparseSetOperation"),
    *("SparseToSparseSetOperation", "ComputeAccidentalHits"),
    *("GenerateBoundingBoxProposals", "UnsortedSegmentJoin", "ParseExample"),
    *("ParseSequenceExample", "ParseSequenceExampleV2", "EditDistance"),
    *("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2"),
    *("SparseSegmentSqrtNGradV2",),
)
whole_family(
    "the number of its results depends on the data of all rows",
    "NonMaxSuppression",
)
whole(
    "it writes into the memory of its input",
    *("InplaceAdd", "InplaceSub", "InplaceUpdate"),
)
whole(
    "TensorFlow has removed it from graphs, or has no kernel for it",
    *("MatrixExponential", "TopK", "Conv2DBackpropFilterV2", "Conv2DBackpropInputV2"),
    *("Conv3DBackpropFilter", "Conv3DBackpropInput"),
)
whole(
    "only XLA can compute it",
    *("SegmentSumV2", "SegmentProdV2", "SegmentMaxV2", "SegmentMinV2"),
)
RAGGED = "its rows have various lengths, and are not divided"
whole_family(RAGGED, "Ragged")
whole(RAGGED, "UnicodeEncode", "StringFormat")
whole_family(
    "the entries of a sparse tensor are not divided",
    *(
        "Sparse",
        "AddManySparse",
        "AddSparse",
        "TakeManySparse",
        "DeserializeManySparse",
    ),
    *("DeserializeSparse", "SerializeManySparse", "SerializeSparse", "CSRSparse"),
    *("DenseToCSRSparse", "Sdca"),
)
whole(
    "it keeps a value of a branch for the gradient",
    *("OptionalFromValue", "OptionalGetValue", "OptionalHasValue", "OptionalNone"),
)
whole(
    "it takes a single string or image, which has no rows",
    *("DecodeAndCropJpeg", "DecodeBmp", "DecodeGif", "DecodeImage", "DecodeJpeg"),
    *("DecodeJxl", "DecodePng", "DecodeWav", "DecodeWebP", "EncodeJpeg"),
    *("EncodeJpegVariableQuality", "EncodePng", "EncodeWav", "ExtractJpegShape"),
    *("ParseTensor", "SerializeTensor", "ParseSingleExample", "DecodeJSONExample"),
    *("ParseSingleSequenceExample", "DecodeProtoV2", "EncodeProto"),
    *("AudioSpectrogram", "Mfcc"),
)
whole(
    "its random numbers are not those of the rows",
    *("SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
    *("StatelessSampleDistortedBoundingBox", "StatelessShuffle", "RandomCrop"),
    *("FractionalAvgPool", "FractionalMaxPool", "FractionalAvgPoolGrad"),
    *("FractionalMaxPoolGrad", "KMC2ChainInitialization", "AllCandidateSampler"),
    *("KmeansPlusPlusInitialization", "FixedUnigramCandidateSampler"),
    *("LearnedUnigramCandidateSampler", "LogUniformCandidateSampler"),
    *("ThreadUnsafeUnigramCandidateSampler", "UniformCandidateSampler"),
)
whole(
    "its rows would be in two dimensions of the result",
    *("Diag", "DiagPart"),
)
whole(
    "its strings may be of various lengths, which a rank cannot tell of others",
    "DecodeRaw",
)
whole_family(
    "it makes or reads a dataset, which all ranks read alike",
    *("Iterator", "AnonymousIterator", "MakeIterator", "MultiDeviceIterator"),
    *("AnonymousMultiDevice", "OneShotIterator", "DeleteIterator", "DeleteMulti"),
    *("Dataset", "DeserializeIterator", "SerializeIterator", "Experimental"),
    *("ReduceDataset", "GetElementAtIndex", "WrapDatasetVariant", "RegisterDataset"),
    *("UnwrapDatasetVariant", "SnapshotDatasetReader", "SnapshotNested"),
)
whole_family(
    "only TensorFlow's own distribution or another device makes it",
    *("TPU", "Collective", "Nccl", "Infeed", "Outfeed", "XlaSparse", "LoadTPU"),
    *("RetrieveTPU", "EnqueueTPU", "DynamicEnqueueTPU", "RecvTPU", "SendTPU"),
    *("ConfigureTPU", "IsTPU", "Cudnn"),
)
